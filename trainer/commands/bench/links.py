"""Measurement of one TCP connection between two hosts: whether it works, its round trip, its throughput."""

import contextlib
import socket
import statistics
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

STREAM_SECONDS = 0.4
_PINGS = 10  # round trips; their median counts
_PING = b"one more"
_CHUNK = 1 << 20  # bytes of one send or receive of the stream
_HELLO = struct.Struct("!8sii")  # protocol, round, rank: sent first by the end that connects
_PROTOCOL = b"trainer1"
_HELLO_SECONDS = 0.5


class Link(NamedTuple):
    """Measurements of a connection at one of its ends.

    Attributes:
        seconds: Median round trip of 8 bytes; None if one didn't come back.
        received: Throughput from the other end, in bytes per second; None if it couldn't be measured.
        why: The error in a few words; "" without one.
    """

    seconds: float | None = None
    received: float | None = None
    why: str = ""


def listening(address: str) -> socket.socket:
    """Opens a socket that listens at an address, "" for all of IPv4, on a port that the system chooses."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=64)


def answer_peer(server: socket.socket, number: int, caller: int, seconds: float) -> Link:
    """Waits for another rank to connect and measures the connection; the other end runs `call_peer`.

    Args:
        server: Result of `listening`.
        number: Number of the round.
        caller: The rank that connects; other connections are closed.
        seconds: Timeout of the wait, and of each send and receive.
    """
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
    """Returns True if the peer is rank `caller` in round `number`, not a late one or a stranger."""
    connection.settimeout(_HELLO_SECONDS)
    try:
        return bool(_HELLO.unpack(_exactly(connection, _HELLO.size)) == (_PROTOCOL, number, caller))
    except OSError:
        return False


def call_peer(where: tuple[str, int], number: int, rank: int, seconds: float) -> Link:
    """Connects to another rank, which runs `answer_peer`, and measures the connection.

    Args:
        where: Address and port at which it listens.
        number: Number of the round.
        rank: This rank, which the other end expects.
        seconds: Timeout of connecting, and of each send and receive.
    """
    try:
        with socket.create_connection(where, timeout=seconds) as connection:
            connection.sendall(_HELLO.pack(_PROTOCOL, number, rank))
            return _measured(connection, seconds, first=True)
    except OSError as error:
        return Link(why=_words(error))


def _measured(connection: socket.socket, seconds: float, first: bool) -> Link:
    """Measures round trips, then a stream in each direction; `first`: this end connected, and sends first."""
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
    """Returns the median round trip in seconds; at the end that answers it includes the wait for the peer."""
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
    """Sends for STREAM_SECONDS, or until the peer takes nothing for `seconds`; then shuts sending down."""
    connection.settimeout(seconds)
    chunk = bytes(_CHUNK)
    until, sent = time.monotonic() + STREAM_SECONDS, 0
    with contextlib.suppress(TimeoutError):
        while sent < 2 or time.monotonic() < until:
            connection.send(chunk)
            sent += 1
    connection.shutdown(socket.SHUT_WR)


def _drained(connection: socket.socket, seconds: float) -> float | None:
    """Receives a stream and returns its bytes per second; None if it came in less than two pieces."""
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
    """Returns the throughput of a stream in bytes per second, without the first quarter of its time.

    Args:
        marks: Time in seconds and total of bytes after each receive.

    Returns:
        None if there are fewer than two marks, or all of one time.
    """
    if len(marks) < 2:
        return None
    (began, _), (end, total) = marks[0], marks[-1]
    since, before = next(mark for mark in marks if mark[0] >= began + (end - began) / 4)
    if since >= end:
        since, before = marks[0]
    return (total - before) / (end - since) if end > since else None


def _exactly(connection: socket.socket, count: int) -> bytes:
    """Receives `count` bytes.

    Raises:
        OSError: If they don't come, or the other end closes before (ConnectionResetError).
    """
    got = b""
    while len(got) < count:
        part = connection.recv(count - len(got))
        if not part:
            raise ConnectionResetError("the other end closed")
        got += part
    return got


def _words(error: OSError) -> str:
    """Returns an error in a few words; "no answer" for a timeout."""
    return "no answer" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()
