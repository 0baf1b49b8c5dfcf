"""Facts from /proc on processes and this thread: parents, memory, time spent waiting for a CPU.

From the kernel's documentation: filesystems/proc.rst (status, smaps_rollup, clear_refs).
"""

import os
import resource
import sys
import threading
from pathlib import Path

from trainer.host.kernel import figures_in
from trainer.host.reading import text_of

_QUEUED = threading.local()


def children(pid: int, proc: Path = Path("/proc")) -> set[int]:
    """Returns the child processes of a process (Linux; elsewhere none)."""
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


def status_of(pid: int | str = "self") -> dict[str, int]:
    """The figures of a process's status, sizes in bytes; empty where the system doesn't tell."""
    return figures_in(text_of(f"/proc/{pid}/status"))


def is_running(pid: int) -> bool:
    """Returns True if a process exists and is neither stopped nor a zombie."""
    state = text_of(f"/proc/{pid}/stat").rpartition(")")[2].split()[:1]
    return bool(state) and state[0] not in "TtZX"


def private_bytes(pid: int) -> int:
    """Bytes that a process has for itself."""
    return figures_in(text_of(f"/proc/{pid}/smaps_rollup")).get("Private_Dirty", 0)


def resident_bytes() -> int:
    """Bytes of this process that are in memory; on macOS the most there ever were."""
    return status_of().get("VmRSS") or peak_bytes()


def peak_bytes() -> int:
    """The most bytes that this process had in memory since its start."""
    unit = 1 if sys.platform == "darwin" else 1024
    return status_of().get("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


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
