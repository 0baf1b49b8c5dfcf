"""Small things that readers and checks share."""

from __future__ import annotations

import contextlib
import stat
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from trainer.commands.doctor.facts import GIB, MIB

Value = TypeVar("Value")


def within(seconds: float, function: Callable[[], Value], otherwise: Value) -> Value:
    """What a function returns; something else if it takes too long (a dead NFS server, a lost GPU) or fails.

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
    """What a path is: folder, file, other; empty if it isn't there, or this user may not look."""
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError):
        return ""
    return "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "other"


def text_of(path: Path) -> str:
    """A file's text; empty if it can't be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except (OSError, ValueError):
        return ""


def size(count: float) -> str:
    """Bytes for people."""
    for unit, bytes_ in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB)):
        if count >= bytes_:
            return f"{count / bytes_:.{1 if count < 10 * bytes_ else 0}f} {unit}".replace(".0 ", " ")
    return f"{count / 1024:.0f} KiB"


def some(words: Iterable[str], most: int = 4) -> str:
    """The first few of a list."""
    listed = list(words)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def pod_volume(name: str, source: str, path: str) -> str:
    """The lines of a pod that mount a volume, as one.

    Args:
        name: Of the volume.
        source: What it is, such as "emptyDir: {}".
        path: Where it is mounted.
    """
    mounts = f"containers: [{{volumeMounts: [{{name: {name}, mountPath: {path}}}]}}]"
    return f"spec: {{volumes: [{{name: {name}, {source}}}], {mounts}}}"


def ranks(count: int) -> str:
    """So many ranks."""
    return f"{count} rank{'s' * (count != 1)}"
