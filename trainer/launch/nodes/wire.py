"""Lines of JSON between two launchers, without blocking, and whether the other end still lives."""

import json
import selectors
import socket
import time
from contextlib import suppress
from typing import Any

# Each end speaks at least this often, and is given up when it hasn't for so long: a cut cable says nothing.
SPEAK_SECONDS = 2.0
SILENT_SECONDS = 30.0
# The longest thing that is said is a traceback of every rank of a node.
LONGEST = 1 << 22

NOISE = "it doesn't speak as a launcher does: does another program use this port?"
ENDED = "its launcher ended"
# What the other end's system answers once no process has the connection. It comes in place of a plain end
# where the process left something unread.
_NOBODY = (ConnectionResetError, BrokenPipeError)

Message = dict[str, Any]


class Wire:
    """One end of a connection.

    Attributes:
        gone: Why the other end can't be spoken to any more; empty while it can.
        most: Bytes of the longest message that it may send.
    """

    def __init__(self, connection: socket.socket, most: int = LONGEST) -> None:
        """Takes a connected socket."""
        self.most = most
        connection.setblocking(False)
        self._socket, self._out, self._in = connection, b"", b""
        self._heard = self._spoke = time.monotonic()
        self.gone = ""

    @property
    def here(self) -> str:
        """This end's address."""
        with suppress(OSError):
            return str(self._socket.getsockname()[0])
        return ""

    @property
    def silent(self) -> float:
        """Seconds since the other end was heard."""
        return time.monotonic() - self._heard

    def say(self, **message: object) -> None:
        """Sends a message; what can't be sent at once follows with `turn`."""
        self._out += json.dumps(message).encode() + b"\n"
        self._spoke = time.monotonic()
        self._flush()

    def turn(self) -> list[Message]:
        """Sends what is left, says that this end lives, and returns what has come."""
        now = time.monotonic()
        if now - self._spoke > SPEAK_SECONDS:
            self.say()
        self._flush()
        self._read(now)
        *lines, self._in = self._in.split(b"\n")
        if not lines and not self.gone and now - self._heard > SILENT_SECONDS:
            self.gone = f"nothing was heard of it for {SILENT_SECONDS:g} s: is its network up?"
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            self.gone = NOISE
            return []
        return [message for message in messages if isinstance(message, dict) and message]

    def wait(self, seconds: float) -> None:
        """Waits until something comes, or for so long."""
        if self.gone:
            time.sleep(seconds)
            return
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            selector.select(seconds)

    def close(self, seconds: float = 2.0) -> None:
        """Sends what is left, for at most so long, and ends the connection."""
        end = time.monotonic() + seconds
        while self._out and not self.gone and time.monotonic() < end:
            self._flush()
            time.sleep(0.01)
        with suppress(OSError):  # closed at once, what the other hasn't read yet could be lost to it
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(0.1)
            while time.monotonic() < end and self._socket.recv(1 << 16):
                pass
        self._socket.close()
        self.gone = self.gone or "it was left"

    def _flush(self) -> None:
        while self._out and not self.gone:
            try:
                self._out = self._out[self._socket.send(self._out) :]
            except BlockingIOError:
                return
            except _NOBODY:
                self._out = b""  # what it said before it ended is still to be read; then its end is found
            except OSError as error:
                self.gone = f"its connection broke ({error.strerror})"

    def _read(self, now: float) -> None:
        end = len(self._in) + self.most  # who never stops must not keep this end from the others
        while not self.gone and len(self._in) < end:
            try:
                read = self._socket.recv(1 << 16)
            except BlockingIOError:
                return
            except _NOBODY:
                read = b""
            except OSError as error:
                self.gone = f"its connection broke ({error.strerror})"
                return
            if not read:
                self.gone = ENDED
                return
            self._heard, self._in = now, self._in + read
            if len(self._in) > self.most and b"\n" not in self._in[-len(read) :]:
                self.gone = NOISE
