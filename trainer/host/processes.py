"""What /proc tells of processes and of this thread: who started whom, and how long it waited for a CPU."""

import os
import threading
from pathlib import Path

_QUEUED = threading.local()


def children(pid: int, proc: Path = Path("/proc")) -> set[int]:
    """The processes that a process started, as far as the system tells (Linux)."""
    try:
        texts = [file.read_text() for file in (proc / str(pid) / "task").glob("*/children")]
    except OSError:  # it is ending
        return set()
    return {int(child) for child in " ".join(texts).split()}


def tree(top: int, proc: Path = Path("/proc")) -> list[int]:
    """A process and all below it; it comes first."""
    found = [top]
    for pid in found:  # grows meanwhile
        found += sorted(children(pid, proc))
    return found


def queued_ns() -> int:
    """Nanoseconds for which this thread could have run and had no CPU; 0 where the kernel doesn't tell."""
    file = getattr(_QUEUED, "file", None)
    if file is None or _QUEUED.process != os.getpid():  # a fork's is another thread
        try:
            file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            file = -1
        _QUEUED.file, _QUEUED.process = file, os.getpid()
    return int(os.pread(file, 96, 0).split()[1]) if file >= 0 else 0
