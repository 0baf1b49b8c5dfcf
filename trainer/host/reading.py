"""Looks at files that neither raise nor wait for ever: of a dead file server, or what isn't there at all."""

from __future__ import annotations

import contextlib
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Value = TypeVar("Value")


def within_seconds(seconds: float, function: Callable[[], Value], otherwise: Value) -> Value:
    """Returns a function's result; `otherwise` if it takes too long (a dead NFS server, a lost GPU) or fails.

    It is left behind in its thread then, which doesn't keep the process from ending.
    """
    found: list[Value] = []

    def call() -> None:
        with contextlib.suppress(Exception):
            found.append(function())

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else otherwise


def kind_of(path: str | Path) -> str:
    """Returns the kind of a path: folder, file, other; empty if absent, or out of this user's sight."""
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError):
        return ""
    return "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "other"


def text_of(path: str | Path) -> str:
    """A file's text; empty if it can't be read."""
    try:  # several times cheaper than pathlib, and some are read for every process twice a second
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123
            return file.read().decode("utf-8", "replace").strip()
    except (OSError, ValueError):  # ValueError: a null byte in the path
        return ""
