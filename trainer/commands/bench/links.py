"""One TCP connection between two hosts: whether it works, its round trip and its throughput."""

import contextlib
import socket
import statistics
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

STREAM_SECONDS = 0.4
_PINGS = 10
_PING = b"one more"
_CHUNK = 1 << 20
_HELLO = struct.Struct("!8sii")  # what it is, round, rank
_WHAT = b"trainer1"
_HELLO_SECONDS = 0.5


class Link(NamedTuple):
    """Measurements of a connection from one of its ends.

    Attributes:
        seconds: Median round trip of 8 bytes; None if nothing came back.
        received: Bytes per second that came from the other end; None if that wasn't measured.
        why: The error, in a few words; empty without one.
    """

    seconds: float | None = None
    received: float | None = None
    why: str = ""


def listening(address: str) -> socket.socket:
    """Opens a socket at which others can reach this address, on a port that the system chooses."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=64)


def answer_peer(server: socket.socket, number: int, caller: int, seconds: float) -> Link:
    """Waits for the rank `caller` in round `number` and measures with it; the other end runs `call_peer`."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        server.settimeout(left)
        try:
            connection, _ = server.accept()
        except TimeoutError:
            break
        with connection:
            if _is_caller(connection, number, caller):
                return _measured(connection, seconds, first=False)
    return Link(why="no answer")


def _is_caller(connection: socket.socket, number: int, caller: int) -> bool:
    """Returns True if the peer is the expected rank of this round, not a late one or a stranger."""
    connection.settimeout(_HELLO_SECONDS)
    try:
        return bool(_HELLO.unpack(_exactly(connection, _HELLO.size)) == (_WHAT, number, caller))
    except OSError:
        return False


def call_peer(where: tuple[str, int], number: int, rank: int, seconds: float) -> Link:
    """Connects as `rank` to the other end, which runs `answer_peer` in this round, and measures with it."""
    try:
        with socket.create_connection(where, timeout=seconds) as connection:
            connection.sendall(_HELLO.pack(_WHAT, number, rank))
            return _measured(connection, seconds, first=True)
    except OSError as error:
        return Link(why=_words(error))


def _measured(connection: socket.socket, seconds: float, first: bool) -> Link:
    """Measures round trips, then a stream in each direction, first from the end that connected."""
    trip = received = None
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(seconds)
        trip = _round_trip(connection, first)
        if first:
            _stream(connection, seconds)
        received = _drained(connection, seconds)
        if not first:
            _stream(connection, seconds)
    except OSError as error:
        return Link(trip, received, _words(error))
    return Link(trip, received)


def _round_trip(connection: socket.socket, first: bool) -> float:
    trips = list[float]()
    for _ in range(_PINGS):
        began = time.perf_counter()
        if first:
            connection.sendall(_PING)
        _exactly(connection, len(_PING))
        if not first:
            connection.sendall(_PING)
        trips.append(time.perf_counter() - began)
    return statistics.median(trips)


def _stream(connection: socket.socket, seconds: float) -> None:
    """Sends for STREAM_SECONDS, then closes its direction; or ends where the peer takes nothing in time."""
    connection.settimeout(seconds)
    chunk = bytes(_CHUNK)
    until, sent = time.monotonic() + STREAM_SECONDS, 0
    with contextlib.suppress(TimeoutError):
        while sent < 2 or time.monotonic() < until:
            connection.send(chunk)
            sent += 1
    connection.shutdown(socket.SHUT_WR)


def _drained(connection: socket.socket, seconds: float) -> float | None:
    """Receives a stream and returns its bytes per second; None if nothing came."""
    buffer, total = bytearray(_CHUNK), 0
    until, marks = time.monotonic() + seconds + STREAM_SECONDS, list[tuple[float, int]]()
    with contextlib.suppress(OSError):
        while (left := until - time.monotonic()) > 0:
            connection.settimeout(left)
            if not (count := connection.recv_into(buffer)):
                break
            total += count
            marks.append((time.perf_counter(), total))
    return rate(marks)


def rate(marks: Sequence[tuple[float, int]]) -> float | None:
    """Returns bytes per second after the first quarter of a stream's time; `marks`: (time, total bytes)."""
    if len(marks) < 2:
        return None
    (began, _), (end, total) = marks[0], marks[-1]
    since, before = next(mark for mark in marks if mark[0] >= began + (end - began) / 4)
    if since >= end:
        since, before = marks[0]
    return (total - before) / (end - since) if end > since else None


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
