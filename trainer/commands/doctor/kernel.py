"""Reads what the kernel grants: CPUs, memory, ulimits, user. Sources: proc(5), cgroup-v{1,2}.rst."""

from __future__ import annotations

import os
import pwd
import re
import resource
from collections.abc import Mapping
from pathlib import Path

from trainer.commands.doctor.facts import System
from trainer.host.kernel import figures_in
from trainer.host.limits import Limits, count_cpus, out_of_memory_kills
from trainer.host.memory_room import read_room
from trainer.host.reading import kind_of, text_of

_IPC_LOCK = 14  # the number of the capability, linux/capability.h


def read_system(root: Path, limits: Limits, environ: Mapping[str, str]) -> System:
    """Reads the facts of the kernel.

    Args:
        root: Folder that stands for "/".
        limits: Limits of the container below `root`.
        environ: Environment variables: HOME.
    """
    memory = figures_in(text_of(root / "proc/meminfo"))
    available = _room(root, memory.get("MemAvailable", 0))
    status = text_of(root / "proc/self/status")
    capabilities = re.search(r"^CapEff:\s+([0-9a-f]+)$", status, re.MULTILINE)
    overcommit = text_of(root / "proc/sys/vm/overcommit_memory")
    return System(
        machine_cpus=count_cpus(text_of(root / "sys/devices/system/cpu/online")) or 0,
        throttled=_throttled(root, limits),
        available=available,
        oom_kills=out_of_memory_kills(root),
        overcommit=int(overcommit) if overcommit.isdecimal() else 0,
        commit_left=memory.get("CommitLimit", 0) - memory.get("Committed_AS", 0),
        ipc_lock=bool(capabilities and int(capabilities[1], 16) & 1 << _IPC_LOCK),
        shm=_shared(root / "dev/shm"),
        rlimits=_rlimits(),
        uid=os.getuid(),
        user=_user(os.getuid()),
        home_error=_home_error(environ.get("HOME", "")),
    )


def _room(root: Path, free: int) -> int:
    """Returns the bytes that are free below the memory limit and in the machine."""
    room = read_room(root)
    left = room.limit_bytes - room.others_bytes
    return min(left, free or left)


def _throttled(root: Path, limits: Limits) -> float | None:
    source = root / limits.sources.get("cpus", "").lstrip("/")
    if source.name not in ("cpu.max", "cpu.cfs_quota_us"):
        return None
    counts = figures_in(text_of(source.with_name("cpu.stat")))
    periods = counts.get("nr_periods", 0)
    return counts.get("nr_throttled", 0) / periods if periods else 0.0


def _shared(folder: Path) -> int | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize if os.access(folder, os.W_OK) else None


def _rlimits() -> dict[str, int]:
    found = {}
    for name in ("nofile", "nproc", "memlock"):
        if (number := getattr(resource, f"RLIMIT_{name.upper()}", None)) is not None:
            soft = resource.getrlimit(number)[0]
            found[name] = -1 if soft == resource.RLIM_INFINITY else soft
    return found


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return ""


def _home_error(home: str) -> str:
    if not home:
        return "HOME isn't set"
    if kind_of(home) != "folder":
        return f"HOME={home} isn't there"
    return "" if os.access(home, os.W_OK | os.X_OK) else f"HOME={home} can't be written"
