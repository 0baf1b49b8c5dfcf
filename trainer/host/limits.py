"""Limits of this container: CPUs, memory, shared memory, processes.

A container shows the machine's figures: 64 cores where the quota is 4, and then 64 loader workers starve one
another. All code that sizes itself asks this module; no other counts CPUs or memory. Sources: the kernel's
cgroup-v2.rst, cgroup-v1/{cpusets,memory,pids}.rst, sched-bwc.rst (cpu.cfs_*); proc_pid_mountinfo(5).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path, PurePosixPath

from trainer.host.kernel import figures_in, mounts, own_cgroups
from trainer.host.reading import text_of

# Those of v1. The v2 hierarchy goes by "", as in /proc/self/cgroup.
_CONTROLLERS = ("cpu", "cpuset", "memory", "pids")
# v1 writes "no limit" as the largest multiple of the page size below 2^63. No machine has 2^60 bytes.
_NO_MEMORY_LIMIT = 1 << 60
# pids.max counts threads too. A loader worker was seen with 4 (PyTorch 2.9); a rank has its own for autograd,
# CUDA, NCCL, the checkpoint writer.
TASKS_PER_WORKER = 4
TASKS_PER_RANK = 64


@dataclass(frozen=True)
class Limits:
    """Limits that hold for all processes of this container together.

    Attributes:
        cpus: CPUs' worth of time, fractional under a quota (1.5).
        memory_bytes: Memory in bytes, of which /dev/shm takes a part; 0 where it is unknown.
        shm_bytes: Free bytes of /dev/shm, 0 where it is absent.
        pids: Processes and threads together; None where unlimited.
        sources: The file or call that decided each figure above. It names the machine's (such as
            /proc/meminfo) unless the container has less than the machine.
    """

    cpus: float
    memory_bytes: int
    shm_bytes: int
    pids: int | None
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)


def read_limits(root: Path = Path("/"), affinity: int | None = None) -> Limits:
    """Reads the limits of this process's cgroup and of all its ancestors; the smallest wins.

    Works with cgroup v1, v2, both at once, and none (macOS). A file that is missing, unreadable or malformed
    sets no limit, and nothing is raised. Limits can change while a container runs: these are today's.

    Args:
        root: Folder that stands for "/".
        affinity: CPUs on which this process may be scheduled; by default, if `root` is "/", as the
            scheduler says.
    """
    if affinity is None and root == Path("/"):
        affinity = len(allowed_cpus())
    cgroups = _cgroups(root)

    def figures(parse: Callable[[str], float | None], *names: str) -> list[tuple[float, str]]:
        """Returns, for each cgroup that limits it, what `parse` makes of these files and the first's path."""
        found = []
        for cgroup in cgroups:
            texts = {name: text for name in names if (text := text_of(cgroup / name))}
            value = parse(" ".join(texts.values()))
            if value is not None:
                found.append((value, f"/{(cgroup / next(iter(texts))).relative_to(root).as_posix()}"))
        return found

    # `min` keeps the first of equals, so the machine comes first: a limit with no effect isn't named.
    online = count_cpus(text_of(root / "sys/devices/system/cpu/online"))
    cpus, cpus_source = min(
        [
            *([(float(online), "/sys/devices/system/cpu/online")] if online else []),
            *figures(_quota, "cpu.max"),
            *figures(_quota, "cpu.cfs_quota_us", "cpu.cfs_period_us"),
            # The effective set, if the kernel has it: cpuset.cpus is a request, and can be empty (inherited).
            *figures(_cpuset, "cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"),
            *([(float(affinity), "sched_getaffinity")] if affinity else []),
        ],
        key=itemgetter(0),
        default=(float(os.cpu_count() or 1), "os.cpu_count"),
    )
    memory, memory_source = min(
        [
            *_physical_memory(root),
            *figures(_bytes, "memory.max"),
            *figures(_bytes, "memory.high"),
            *figures(_bytes, "memory.limit_in_bytes"),
            # v1: the smallest limit of all ancestors, also of those that the container can't see.
            *figures(lambda text: _finite(figures_in(text).get("hierarchical_memory_limit")), "memory.stat"),
        ],
        key=itemgetter(0),
        default=(0, "unknown"),
    )
    pids, pids_source = min(figures(_integer, "pids.max"), key=itemgetter(0), default=(None, "no limit"))
    return Limits(
        cpus=cpus,
        memory_bytes=int(memory),
        shm_bytes=_shm_bytes(root),
        pids=None if pids is None else int(pids),
        sources={
            "cpus": cpus_source,
            "memory_bytes": memory_source,
            "shm_bytes": "/dev/shm",
            "pids": pids_source,
        },
    )


def out_of_memory_kills(root: Path = Path("/")) -> int:
    """Counts the processes of this process's cgroup that the kernel killed because memory was full.

    Counts since the cgroup was made: a job's kills are the difference of two readings. 0 without a counter.

    Args:
        root: Folder that stands for "/".
    """
    files = [cgroup / name for cgroup in _cgroups(root) for name in ("memory.oom_control", "memory.events")]
    counts = [figures_in(text_of(file)).get("oom_kill") for file in files]
    # The innermost: what is around it may count other containers' (v2), or not what is in it (v1).
    return next((count for count in reversed(counts) if count is not None), 0)


def threads_per_rank(limits: Limits, local_world_size: int) -> int:
    """Returns the compute threads for one rank: its part of the CPUs rounded down, and at least 1.

    Args:
        limits: What the ranks share. Where the launcher bound each rank to CPUs of its own (Slurm's
            --cpu-bind), that is already one rank's part: pass 1 as `local_world_size`.
        local_world_size: Ranks in this container, at least 1.
    """
    return max(1, math.floor(limits.cpus / local_world_size))


def workers_per_rank(limits: Limits, local_world_size: int, quarters: int = 3) -> int:
    """Returns the loader workers for one rank: 75 % of its part of the CPUs, rounded down.

    The rest is for the rank itself, which launches kernels, pins batches and writes checkpoints. A part of
    at least 1 CPU gives at least 1 loader worker. A smaller one gives 0, loading in the rank's process: a
    loader worker would only take turns with it. A pids limit allows fewer: a rank needs 64 tasks, a loader
    worker 4.

    Args:
        limits: What the ranks share; see `threads_per_rank`.
        local_world_size: Ranks in this container, at least 1.
        quarters: Quarters of the rank's CPUs to use instead of 3; at most 4.
    """
    if limits.cpus < local_world_size:
        return 0
    # One division, so that a part such as 16/3, of which 75 % is 4, can't round to 3.
    workers = max(1, math.floor(limits.cpus * quarters / (local_world_size * 4)))
    return max(0, min(workers, _spare_processes(limits, local_world_size)))


def compilers_per_rank(limits: Limits, local_world_size: int) -> int:
    """Returns the processes with which one rank may compile (torch would take one for each CPU it sees).

    Args:
        limits: What the ranks share; see `threads_per_rank`.
        local_world_size: Ranks in this container, at least 1.
    """
    return max(1, min(threads_per_rank(limits, local_world_size), _spare_processes(limits, local_world_size)))


def _spare_processes(limits: Limits, local_world_size: int) -> int:
    """Returns the number of processes that a rank may start; a large one where there is no limit."""
    if limits.pids is None:
        return 1 << 20
    return (limits.pids // local_world_size - TASKS_PER_RANK) // TASKS_PER_WORKER


def allowed_cpus() -> frozenset[int]:
    """Returns the CPUs on which this container's processes may be scheduled; empty if unknown (macOS)."""
    if _before_binding is not None:
        return _before_binding
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def keep_to(cpus: frozenset[int]) -> None:
    """Binds this thread, and those it starts later, to some CPUs; `read_limits` still counts all."""
    global _before_binding  # noqa: PLW0603
    if hasattr(os, "sched_setaffinity"):
        _before_binding = allowed_cpus()
        os.sched_setaffinity(0, cpus)


_before_binding: frozenset[int] | None = None


def count_cpus(text: str) -> int | None:
    """Returns how many CPUs a kernel list such as "0-3,8" names; None if it is empty or malformed."""
    ranges = _ranges(text)
    return None if ranges is None else sum(map(len, ranges))


def listed_cpus(text: str) -> list[int] | None:
    """The CPUs that a kernel list such as "0-3,8" names; None if it is empty or malformed."""
    ranges = _ranges(text)
    return None if ranges is None else [cpu for part in ranges for cpu in part]


def _ranges(text: str) -> list[range] | None:
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        if match is None:
            return None
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            return None
        found.append(range(first, last + 1))
    return found


def _cgroups(root: Path) -> list[Path]:
    """Returns the folders of this process's cgroups and of all their ancestors, down from each mount.

    Not all need exist: in a container, /proc/self/cgroup often names the path that the host sees, of which
    only the mount itself is there.
    """
    own = own_cgroups(root)
    found: dict[Path, None] = {}  # an ordered set
    for controller, mounted, mount_point in _mounts(root):
        try:
            below = PurePosixPath(own.get(controller, "/")).relative_to(mounted).parts
        except ValueError:  # this process's cgroup is not in the part of the hierarchy that is mounted
            below = ()
        if ".." in below:  # nor in the cgroup namespace
            below = ()
        mount = root / mount_point.lstrip("/")
        found.update(dict.fromkeys(mount.joinpath(*below[:depth]) for depth in range(len(below) + 1)))
    return list(found)


def _mounts(root: Path) -> list[tuple[str, str, str]]:
    """Returns (controller, the cgroup that is mounted, where), from mountinfo or else as is standard."""
    found = []
    for mount in mounts(root):
        names = {"cgroup": mount.options, "cgroup2": [""]}.get(mount.kind, [])
        found += [(name, mount.inner, mount.point) for name in ("", *_CONTROLLERS) if name in names]
    standard = [("", "/sys/fs/cgroup"), ("", "/sys/fs/cgroup/unified")]
    standard += [(name, f"/sys/fs/cgroup/{name}") for name in _CONTROLLERS]
    known = {name for name, _, _ in found}
    return found + [(name, "/", mount_point) for name, mount_point in standard if name not in known]


def _integer(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]{1,19}", text) else None  # None for "max", and "-1" of v1


def _bytes(text: str) -> int | None:
    return _finite(_integer(text))


def _finite(size: int | None) -> int | None:
    # 0 isn't a real limit: memory.high is set to it to reclaim memory at once.
    return size if size is not None and 0 < size < _NO_MEMORY_LIMIT else None


def _quota(text: str) -> float | None:
    """Returns the CPUs of "quota period", both in µs; None for "max 100000" (v2) and "-1 100000" (v1)."""
    match = re.fullmatch(r"([1-9][0-9]{0,18}) ([1-9][0-9]{0,18})", text)
    return int(match[1]) / int(match[2]) if match else None


def _cpuset(text: str) -> int | None:
    return count_cpus(text.partition(" ")[0])


def _physical_memory(root: Path) -> list[tuple[float, str]]:
    if total := figures_in(text_of(root / "proc/meminfo")).get("MemTotal"):
        return [(total, "/proc/meminfo")]
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return []
    return [(size, "sysconf SC_PHYS_PAGES")] if size > 0 else []


def _shm_bytes(root: Path) -> int:
    try:
        shm = os.statvfs(root / "dev/shm")
    except (AttributeError, OSError):
        return 0
    return shm.f_bavail * shm.f_frsize
