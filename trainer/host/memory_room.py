"""Memory use of a job within its container, and a guard that ends the job before the kernel kills it.

From the kernel's documentation: cgroup-v1/memory.rst, cgroup-v2.rst. Where /proc is missing (macOS), a
rank's own peak is all that is known.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer.host.kernel import figures_in
from trainer.host.limits import read_limits
from trainer.host.processes import children, is_running, private_bytes, status_of, tree
from trainer.host.reading import text_of

HEADROOM = 0.05  # of a memory stays free: fragmentation and neighbors are not the same every time
_LOOK_SECONDS = 0.01
_REST_SECONDS = 0.25  # between two looks at what isn't a rank, which cost milliseconds each
_STOP_SECONDS = 1.0


@dataclass(frozen=True)
class Room:
    """The memory of this container.

    Attributes:
        limit_bytes: The limit; 0 if unknown.
        others_bytes: What is in use already and can't be taken back: no page cache.
        source: The file that sets the limit.
    """

    limit_bytes: int
    others_bytes: int
    source: str

    @property
    def spare_bytes(self) -> float:
        """Returns the bytes that may still be allocated, less some headroom; infinite without a limit."""
        return (1 - HEADROOM) * self.limit_bytes - self.others_bytes if self.limit_bytes else math.inf


def read_room(root: Path = Path("/")) -> Room:
    """Reads the limit, and what other processes use of it; `root` is a folder that stands for "/"."""
    limits = read_limits(root)
    source = limits.sources["memory_bytes"]
    beside = root / source.lstrip("/")
    stat = figures_in(text_of(beside.with_name("memory.stat"))) if beside.name.startswith("memory.") else {}
    if stat:  # v1 counts what is below a group in the keys with total_
        used = _sum(stat, "total_rss", "total_shmem") or _sum(stat, "anon", "shmem", "slab_unreclaimable")
    else:
        memory = figures_in(text_of(root / "proc/meminfo"))
        used = max(0, memory.get("MemTotal", 0) - memory.get("MemAvailable", 0))
    return Room(limits.memory_bytes, min(used, limits.memory_bytes), source)


def cap_own(room_bytes: int) -> None:
    """Makes an allocation fail that would exceed so many more bytes in this process, and so in the container.

    Address space is counted, not memory: all that is mapped so far is left to it.
    """
    status = status_of()
    if not status:
        return
    mapped, resident = status.get("VmData", 0), status.get("RssAnon", 0)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    wanted = mapped + max(0, room_bytes - resident)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(
            resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )


class MemoryGuard:
    """Looks at a job's memory a hundred times a second, and kills the job when it has too much.

    The job is all that this process starts, down to loader workers. Of ranks it counts anonymous and shared
    memory (the ring of their batches); of others only private memory, as a loader worker begins with its
    rank's pages; mapped files count once, as all map the same ones.

    Attributes:
        rest_bytes: Peak memory of the processes that aren't ranks.
        peak_bytes: Peak memory of all processes.
        killed: Why the job was killed, or "".
    """

    def __init__(
        self, ranks: Callable[[], Iterable[int]], allowed_bytes: float, seconds: float = float("inf")
    ) -> None:
        """Sets the bounds.

        Args:
            ranks: Returns the known pids of the ranks.
            allowed_bytes: What the job may have; infinite: no bound.
            seconds: How long it may take.
        """
        self.rest_bytes, self.peak_bytes, self.killed = 0, 0, ""
        self._ranks, self._allowed, self._seconds = ranks, allowed_bytes, seconds
        self._before = children(os.getpid())
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)

    def __enter__(self) -> MemoryGuard:
        """Begins to look."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Looks no more."""
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        began = looked = time.monotonic()
        rest = 0
        while not self._end.wait(_LOOK_SECONDS):
            ranks, now = set(self._ranks()), time.monotonic()
            if now - looked > _REST_SECONDS:
                looked = now
                rest = sum(private_bytes(pid) for pid in self._job() if pid not in ranks)
                self.rest_bytes = max(self.rest_bytes, rest)
            held = [_held(pid) for pid in ranks]
            total = sum(own for own, _ in held) + max((file for _, file in held), default=0) + rest
            self.peak_bytes = max(self.peak_bytes, total)
            if total > self._allowed:
                self._kill("more than that was wanted")
            elif now - began > self._seconds:
                self._kill(f"took longer than {self._seconds:.0f} s")

    def _job(self) -> list[int]:
        return [pid for child in children(os.getpid()) - self._before for pid in tree(child)]

    def _kill(self, why: str) -> None:
        self.killed = self.killed or why
        # What a process forks after it was listed would lose its parent, and be found no more: so each is
        # stopped first, until none runs; one that waits for a disk can't be, and is waited for a second only.
        until = time.monotonic() + _STOP_SECONDS
        while (running := [pid for pid in self._job() if is_running(pid)]) and time.monotonic() < until:
            for pid in running:
                _send(pid, signal.SIGSTOP)
            time.sleep(_LOOK_SECONDS / 10)
        for pid in reversed(self._job()):
            _send(pid, signal.SIGKILL)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def _held(pid: int) -> tuple[int, int]:
    """Bytes of anonymous and shared memory, and of files, that a process has in memory."""
    status = status_of(pid)
    return _sum(status, "RssAnon", "RssShmem"), status.get("RssFile", 0)


def _sum(figures: Mapping[str, int], *keys: str) -> int:
    return sum(figures.get(key, 0) for key in keys)
