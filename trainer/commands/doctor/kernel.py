"""Reads what the kernel grants: CPUs, memory, shared memory, ulimits. From proc(5) and cgroup-v{1,2}.rst."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import resource
from pathlib import Path

from trainer.commands.doctor.facts import MIB, System
from trainer.host.limits import Limits, listed_cpus, out_of_memory_kills
from trainer.host.memory import read_room
from trainer.host.reading import text_of

_MOST_LOCKED = 64 * MIB


def read_system(root: Path, limits: Limits) -> System:
    """Reads it.

    Args:
        root: Folder that stands for "/".
        limits: What was read below it.
    """
    memory = dict(re.findall(r"^(\w+):\s+(\d+) kB$", text_of(root / "proc/meminfo"), re.MULTILINE))
    kib = {name: int(value) * 1024 for name, value in memory.items()}
    available = _room(root, kib.get("MemAvailable", 0))
    status = text_of(root / "proc/self/status")
    allowed = re.search(r"^Cpus_allowed_list:\s+(\S+)$", status, re.MULTILINE)
    nodes = {}
    for file in (root / "sys/devices/system/node").glob("node[0-9]*/cpulist"):
        nodes[int(file.parent.name[4:])] = _cpus(text_of(file))
    tried = min(_MOST_LOCKED, available // 8)
    overcommit = text_of(root / "proc/sys/vm/overcommit_memory")
    return System(
        machine_cpus=len(_cpus(text_of(root / "sys/devices/system/cpu/online"))),
        allowed_cpus=_cpus(allowed[1]) if allowed else frozenset(),
        nodes=nodes,
        throttled=_throttled(root, limits),
        available=available,
        oom_kills=out_of_memory_kills(root),
        swap_total=kib.get("SwapTotal", 0),
        swapped=kib.get("SwapTotal", 0) - kib.get("SwapFree", 0),
        overcommit=int(overcommit) if overcommit.isdecimal() else 0,
        commit_left=kib.get("CommitLimit", 0) - kib.get("Committed_AS", 0),
        locked=lock(tried),
        tried=tried,
        shm=_shared(root / "dev/shm"),
        rlimits=_rlimits(),
        core_pattern=text_of(root / "proc/sys/kernel/core_pattern"),
    )


def lock(most: int) -> int | None:
    """Locks memory for real, and lets it go again.

    Args:
        most: Bytes to try first; then ever less.

    Returns:
        Bytes that could be locked; None where there is no mlock.
    """
    count = most // mmap.PAGESIZE * mmap.PAGESIZE
    if not count:
        return None
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        with mmap.mmap(-1, count) as memory:
            first = ctypes.c_char.from_buffer(memory)
            address = ctypes.c_void_p(ctypes.addressof(first))
            while count >= mmap.PAGESIZE and libc.mlock(address, ctypes.c_size_t(count)):
                count //= 2
            libc.munlock(address, ctypes.c_size_t(most))
            del address, first  # or the mapping can't be closed
    except (OSError, AttributeError, ValueError):
        return None
    return count if count >= mmap.PAGESIZE else 0


def _room(root: Path, free: int) -> int:
    """Bytes that are left below the memory limit, and in the machine."""
    room = read_room(root)
    left = room.limit_bytes - room.others_bytes
    return min(left, free or left)


def _cpus(text: str) -> frozenset[int]:
    return frozenset(listed_cpus(text) or ())


def _throttled(root: Path, limits: Limits) -> float | None:
    source = root / limits.sources.get("cpus", "").lstrip("/")
    if source.name not in ("cpu.max", "cpu.cfs_quota_us"):
        return None
    text = text_of(source.with_name("cpu.stat"))
    counts = dict(re.findall(r"^(nr_periods|nr_throttled) (\d{1,19})$", text, re.MULTILINE))
    periods = int(counts.get("nr_periods", 0))
    return int(counts.get("nr_throttled", 0)) / periods if periods else 0.0


def _shared(folder: Path) -> int | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize if os.access(folder, os.W_OK) else None


def _rlimits() -> dict[str, int]:
    names = ("nofile", "nproc", "stack", "core", "memlock")
    found = {}
    for name in names:
        if (number := getattr(resource, f"RLIMIT_{name.upper()}", None)) is not None:
            soft = resource.getrlimit(number)[0]
            found[name] = -1 if soft == resource.RLIM_INFINITY else soft
    return found
