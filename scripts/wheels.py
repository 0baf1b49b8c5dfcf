"""Reads a stack's `wheels.lock`; shared by `lock.py`, which writes it, `bootstrap.py` and the tests."""

import hashlib
import re
import sys
from pathlib import Path
from typing import NamedTuple


class Wheel(NamedTuple):
    """A requirement of a lock: version, marker, the groups that need it, and its lines."""

    name: str
    version: str
    marker: str
    groups: list[str]
    text: str

    @property
    def hashes(self) -> list[str]:
        """The sha256 of each file that serves it."""
        return re.findall(r"--hash=sha256:([0-9a-f]{64})", self.text)


def canonical(name: str) -> str:
    """A package's name as wheels write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(text: str) -> list[Wheel]:
    """Parses a lock: after the header, a `# groups: …` line before each requirement."""
    wheels = []
    for block in re.split(r"^# groups: ", text, flags=re.MULTILINE)[1:]:
        groups, requirement = block.split("\n", 1)
        pin, _, marker = requirement.partition("\\\n")[0].partition(" ; ")
        name, _, version = pin.strip().partition("==")
        wheels.append(Wheel(name, version, marker.strip(), groups.split(), requirement.strip()))
    return wheels


def select(wheels: list[Wheel], groups: list[str]) -> str:
    """The requirements of some groups; wheels only, so that no code runs to build one."""
    return "--only-binary :all:\n" + "".join(f"{w.text}\n" for w in wheels if set(groups) & set(w.groups))


def digest(wheels: list[Wheel], groups: list[str]) -> dict[str, str]:
    """The hash of what each group needs."""
    return {group: hashlib.sha256(select(wheels, [group]).encode()).hexdigest() for group in groups}


if __name__ == "__main__":  # wheels.py LOCK NAME…: for a pip of any Python, so without the markers
    for one in read_lock(Path(sys.argv[1]).read_text()):
        if one.name in sys.argv[2:]:
            print(re.sub(r" ; [^\\]*\\", " \\\\", one.text, count=1))
