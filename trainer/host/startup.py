"""Settings that a process makes before anything else is imported. Imports no torch."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def print_anything() -> None:
    """Lets standard output take any character, as standard error does: LC_ALL=C may be set."""
    _take_anything(sys.stdout)


def _take_anything(stream: object) -> bool:
    """Lets a stream write any character; returns True if that changed it.

    Bytes of a path that are no text are written as they came.
    """
    if not isinstance(stream, io.TextIOWrapper) or stream.errors != "strict":
        return False
    utf = stream.encoding.lower().startswith("utf")
    stream.reconfigure(errors="surrogateescape" if utf else "backslashreplace")
    return True


@contextmanager
def any_character() -> Iterator[None]:
    """Makes both standard streams write any character within the block, also those put in their place."""
    streams: tuple[Any, ...] = (sys.stdout, sys.stderr)
    changed = [stream for stream in streams if _take_anything(stream)]
    try:
        yield
    finally:
        for stream in changed:
            if not stream.closed:
                stream.reconfigure(errors="strict")


def wait_passively() -> None:
    """Lets this process's compute threads sleep while they wait, as those of a rank; before torch's import.

    For a process that forks others which compute: OpenMP reads the variable when it is loaded.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
