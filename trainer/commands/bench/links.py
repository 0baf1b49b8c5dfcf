"""One TCP connection between two hosts: is it there, how long does it take, and how much does it carry."""

import contextlib
import select
import socket
import statistics
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

STREAM_SECONDS = 0.4
_PINGS, _PING_SECONDS = 40, 0.3
_PING, _LAST = b"one more", b"the last"
_CHUNK = 1 << 20
_HELLO = struct.Struct("!8sii")  # what it is, round, rank
_WHAT = b"trainer1"
_HELLO_SECONDS = 0.5
_BACKLOG = 64


class Link(NamedTuple):
    """What one end found of a link.

    Attributes:
        seconds: Median round trip of 8 bytes; None if nothing came back.
        received: Bytes per second that came from the other end; None if that wasn't measured.
        why: What went wrong, in a few words; empty if nothing did.
    """

    seconds: float | None = None
    received: float | None = None
    why: str = ""


def listening(address: str) -> socket.socket:
    """A socket at which others can reach this address, on a port that the system chooses."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    server.bind((address, 0))
    server.listen(_BACKLOG)
    return server


def answer_peer(server: socket.socket, number: int, caller: int, seconds: float) -> Link:
    """Waits for the rank `caller` in round `number`, and measures with it; the other end does `call_peer`."""
    until = time.monotonic() + seconds
    while True:
        left = until - time.monotonic()
        if left <= 0 or not select.select([server], [], [], left)[0]:
            return Link(why="no answer")
        connection, _ = server.accept()
        with connection:
            if not _is_caller(connection, number, caller):
                continue
            try:
                return _measured(connection, seconds, first=False)
            except OSError as error:
                return Link(why=_words(error))


def _is_caller(connection: socket.socket, number: int, caller: int) -> bool:
    """Whether it is who was waited for, and not one who is late, or a stranger."""
    connection.settimeout(_HELLO_SECONDS)
    try:
        return bool(_HELLO.unpack(_exactly(connection, _HELLO.size)) == (_WHAT, number, caller))
    except OSError:
        return False


def call_peer(where: tuple[str, int], number: int, rank: int, seconds: float) -> Link:
    """Connects to the other end, which does `answer_peer`, and measures with it.

    Args:
        where: Address and port there.
        number: Of the round, the same there.
        rank: Of this rank.
        seconds: How long to wait for an answer.
    """
    try:
        with socket.create_connection(where, timeout=seconds) as connection:
            connection.sendall(_HELLO.pack(_WHAT, number, rank))
            return _measured(connection, seconds, first=True)
    except OSError as error:
        return Link(why=_words(error))


def _measured(connection: socket.socket, seconds: float, first: bool) -> Link:
    """Round trips, then a stream in each direction: first from the end that has called."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(seconds)
    trip = _round_trips(connection) if first else _answered(connection)
    received = None
    try:
        if first:
            _stream(connection, seconds)
        received = _drained(connection, seconds)
        if not first:
            _stream(connection, seconds)
    except OSError as error:
        return Link(trip, received, _words(error))
    return Link(trip, received)


def _round_trips(connection: socket.socket) -> float:
    """The median of some; the last one says that it is."""
    trips = list[float]()
    until = time.monotonic() + _PING_SECONDS
    last = False
    while not last:
        last = len(trips) + 1 >= _PINGS or (len(trips) >= 2 and time.monotonic() > until)
        began = time.perf_counter()
        connection.sendall(_LAST if last else _PING)
        _exactly(connection, len(_PING))
        trips.append(time.perf_counter() - began)
    return statistics.median(trips)


def _answered(connection: socket.socket) -> float:
    """The other end of them; how long it took for one on the average."""
    began, count, message = time.perf_counter(), 0, _PING
    while message != _LAST:
        message = _exactly(connection, len(_PING))
        connection.sendall(message)
        count += 1
    return (time.perf_counter() - began) / count


def _stream(connection: socket.socket, seconds: float) -> None:
    """Sends for a while, then says that this was all; a link that takes nothing more has had enough."""
    connection.settimeout(seconds)
    chunk = memoryview(bytes(_CHUNK))
    until = time.monotonic() + STREAM_SECONDS
    sent = 0
    try:
        while sent < 2 or time.monotonic() < until:
            connection.send(chunk)
            sent += 1
    except TimeoutError:
        pass
    connection.shutdown(socket.SHUT_WR)


def _drained(connection: socket.socket, seconds: float) -> float | None:
    """Bytes per second of a stream, as far as it came."""
    buffer = bytearray(_CHUNK)
    until = time.monotonic() + seconds + STREAM_SECONDS
    marks = list[tuple[float, int]]()
    total = 0
    with contextlib.suppress(OSError):
        while (left := until - time.monotonic()) > 0:
            connection.settimeout(left)
            count = connection.recv_into(buffer)
            if not count:
                break
            total += count
            marks.append((time.perf_counter(), total))
    return rate(marks)


def rate(marks: Sequence[tuple[float, int]]) -> float | None:
    """Bytes per second after the first quarter of a stream's time.

    Args:
        marks: When so many bytes in all had come: seconds and bytes, in order.
    """
    if len(marks) < 2:
        return None
    quarter = marks[0][0] + (marks[-1][0] - marks[0][0]) / 4
    begin = next(mark for mark in marks if mark[0] >= quarter)
    if marks[-1][0] <= begin[0]:
        begin = marks[0]
    span = marks[-1][0] - begin[0]
    return (marks[-1][1] - begin[1]) / span if span > 0 else None


def _exactly(connection: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count:
        part = connection.recv(count - len(got))
        if not part:
            raise ConnectionResetError("the other end closed")
        got += part
    return got


def _words(error: OSError) -> str:
    return "no answer" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()
