"""Waits for a state: a file, a row, a process's end; never for a time."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
SECONDS = 300.0  # for what takes a moment on a quiet machine


def until(state: Callable[[], T], told: Callable[[], object] | str = "", seconds: float = SECONDS) -> T:
    """Returns the result of `state`, which is looked at again and again, once that is true.

    `told`, words or what returns logs, rows, stacks, helps where it never is: after `seconds`, in which a
    machine that is merely slow is done.
    """
    end = time.monotonic() + seconds
    while not (found := state()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds:g} s: {told() if callable(told) else told}")
        time.sleep(0.01)
    return found


def exists(pid: int) -> bool:
    """Whether a process is there, and has not only not been waited for."""
    with suppress(ProcessLookupError, FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def until_gone(*pids: int) -> None:
    """Waits until none of the processes is there any more."""
    until(lambda: not any(map(exists, pids)), lambda: [pid for pid in pids if exists(pid)])
