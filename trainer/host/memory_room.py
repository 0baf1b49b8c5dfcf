"""Memory of this container, and what others hold of it.

From the kernel's documentation: cgroup-v1/memory.rst, cgroup-v2.rst.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer.host.kernel import figures_in
from trainer.host.limits import read_limits
from trainer.host.reading import text_of

HEADROOM = 0.05  # of a memory stays free: fragmentation and neighbors are not the same every time


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


def _sum(figures: Mapping[str, int], *keys: str) -> int:
    return sum(figures.get(key, 0) for key in keys)
