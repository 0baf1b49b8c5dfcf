"""Readers of the kernel's files: figures, mounts, cgroups, the processor.

From its documentation: filesystems/proc.rst, cgroup-v2.rst, cgroup-v1/*.rst; and proc_pid_mountinfo(5). What
is missing (macOS, gVisor) or malformed isn't there; nothing raises.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from trainer.host.reading import text_of


class Mounted(NamedTuple):
    """A line of mountinfo.

    Attributes:
        device: Its numbers, "8:1".
        inner: The folder within the file system that is mounted.
        point: Where.
        kind: Of the file system: ext4, cgroup2, …
        options: Of the file system; v1 lists the controllers of a hierarchy there.
    """

    device: str
    inner: str
    point: str
    kind: str
    options: list[str]


def figures_in(text: str) -> dict[str, int]:
    """The whole numbers of "anon 4096", "nr_throttled 7", "VmRSS:  12 kB", by name; kB become bytes."""
    found = re.findall(r"^([^\s:]+):?[ \t]+([0-9]{1,20})\b( kB)?", text, re.MULTILINE)
    return {name: int(value) * (1024 if unit else 1) for name, value, unit in found}


def mounts(root: Path = Path("/")) -> Iterator[Mounted]:
    """Yields the mounts that this process sees; `root` is a folder that stands for "/"."""
    for line in text_of(root / "proc/self/mountinfo").splitlines():
        # 36 35 0:30 /inner /mount/point rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
        left, _, right = line.partition(" - ")
        mount, filesystem = left.split(), right.split()
        if len(mount) > 4 and len(filesystem) > 2:
            inner, point = (
                re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), path) for path in mount[3:5]
            )
            yield Mounted(mount[2], inner, point, filesystem[0], filesystem[2].split(","))


def own_cgroups(root: Path = Path("/")) -> dict[str, str]:
    """Returns this process's cgroup by controller of v1; that of v2 by ""."""
    own = {}
    for line in text_of(root / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        own.update(dict.fromkeys(controllers.split(","), path))
    return own


def processor() -> str | None:
    """Returns the processor's name, if the kernel has it."""
    lines = text_of("/proc/cpuinfo").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
