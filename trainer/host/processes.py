"""Facts from /proc on processes and this thread: parents, memory, time spent waiting for a CPU.

From the kernel's documentation: filesystems/proc.rst (status, clear_refs).
"""

import os
import resource
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from trainer.host.kernel import figures_in
from trainer.host.reading import text_of

_QUEUED = threading.local()
_LOOKS, _LOOK_S = 50, 0.002  # at threads that spin


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


def openmp_threads() -> frozenset[str]:
    """Returns the ids of threads of this process that sleep in GNU's OpenMP, as those that it keeps do.

    A fork has none of them, and what waits for one there, as torch's parallel code does, hangs. Threads of
    other libraries sleep elsewhere. Empty where the kernel doesn't tell where a thread is (proc(5)).
    """
    own = {str(thread.native_id) for thread in threading.enumerate()}
    for _ in range(_LOOKS):
        with suppress(OSError):
            where = {task.name: text_of(task / "syscall") for task in Path("/proc/self/task").iterdir()}
            others = {name: text.split() for name, text in where.items() if name not in own}
            if not any(words == ["running"] for words in others.values()):
                break
        time.sleep(_LOOK_S)  # one that has just computed spins before it sleeps
    else:
        others = {}
    places = {name: int(words[-1], 16) for name, words in others.items() if len(words) > 1}
    spans = _mapped("libgomp") if places else ()
    return frozenset(name for name, place in places.items() if any(place in span for span in spans))


def _mapped(library: str) -> list[range]:
    """Returns where code of a library is in this process's memory."""
    lines = [line.split(maxsplit=5) for line in text_of("/proc/self/maps").splitlines()]
    found = [words[0].split("-") for words in lines if len(words) == 6 and library in Path(words[5]).name]
    return [range(int(begin, 16), int(end, 16)) for begin, end in found]


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
