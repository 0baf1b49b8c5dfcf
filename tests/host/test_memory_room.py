"""Promise: the memory of a container, and what others hold of it, are read on each kind of box."""

from pathlib import Path

from tests.helpers.planted import write
from trainer.host.memory_room import Room, read_room

MIB = 1 << 20
MEMINFO = "MemTotal: 4096 kB\nMemFree: 1024 kB\nMemAvailable: 3072 kB\n"


def test_room_of_each_kind_of_box(tmp_path: Path) -> None:
    write(tmp_path / "host", {"proc/meminfo": MEMINFO})
    assert read_room(tmp_path / "host") == Room(4 * MIB, MIB, "/proc/meminfo")
    folder = "sys/fs/cgroup"
    stat = "anon 1000\nfile 500000\nshmem 200\nslab_unreclaimable 30"
    limits = {f"{folder}/memory.max": str(2 * MIB), f"{folder}/memory.stat": stat}
    v2 = write(tmp_path / "v2", {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/", **limits})
    assert read_room(v2) == Room(2 * MIB, 1230, "/sys/fs/cgroup/memory.max")
    folder += "/memory"
    # The keys of v1 without total_ leave out what is below.
    stat = "rss 5\nshmem 6\ntotal_rss 1000\ntotal_shmem 200\ntotal_cache 9999"
    limits = {f"{folder}/memory.limit_in_bytes": str(MIB), f"{folder}/memory.stat": stat}
    v1 = write(tmp_path / "v1", {"proc/meminfo": MEMINFO, "proc/self/cgroup": "4:memory:/", **limits})
    assert read_room(v1) == Room(MIB, 1200, "/sys/fs/cgroup/memory/memory.limit_in_bytes")
    assert read_room(tmp_path / "nothing").others_bytes == 0
