"""Waiting for a state: a file, a row, a process's end; never for a time."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

SECONDS = 120.0  # for what takes a moment on a quiet machine


def until(
    condition: Callable[[], object], told: Callable[[], object] = lambda: "", seconds: float = SECONDS
) -> None:
    """Waits until a condition holds; else an error with what `told` returns: logs, rows, stacks."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it did not happen within {seconds:g} s: {told()}"
        time.sleep(0.01)


def exists(pid: int) -> bool:
    """Whether a process is there, and has not only not been waited for."""
    with suppress(ProcessLookupError, FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def until_gone(*pids: int) -> None:
    """Waits until none of the processes is there any more."""
    until(lambda: not any(map(exists, pids)), lambda: [pid for pid in pids if exists(pid)])
