"""The pinned stacks, from the table that `scripts/stack_table.py` makes of stacks/*/stack.toml and locks.

And the record of an installation: scripts/bootstrap.py leaves one in .venv, install_wheels.py in the image.

Standard library only: scripts/engine_checks.py imports it.
"""

from __future__ import annotations

import importlib.resources
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True)
class Stack:
    """A set of versions that fit together.

    Attributes:
        name: Folder of stacks/.
        conda: Whether PyTorch is a conda package, not a wheel.
        torch: Version of torch.
        torchvision: Version of torchvision.
        torchaudio: Version of torchaudio.
        cuda: Version of CUDA.
        architectures: GPUs that torch has code for, such as sm_90.
        native: Minimum driver version for all features.
        floor: Minimum driver version without JIT of PTX.
        supported_until: Last day on which its locks get security fixes (2027-11-30).
        lock: SHA-256 of wheels.lock.
        wheels: Version of each locked wheel that training needs; several where they depend on the Python.
    """

    name: str
    conda: bool
    torch: str
    torchvision: str
    torchaudio: str
    cuda: str
    architectures: list[str]
    native: str
    floor: str
    supported_until: str
    lock: str
    wheels: Mapping[str, str]

    def covers(self, architecture: str) -> bool:
        """Returns True if torch has code for a GPU (sm_86): the same generation, and not newer."""
        wanted = divmod(int(architecture[3:]), 10)
        has = [divmod(int(one[3:]), 10) for one in self.architectures]
        return any(one[0] == wanted[0] and one[1] <= wanted[1] for one in has)


def read_stacks() -> dict[str, Stack]:
    """Reads all stacks, by name."""
    text = (importlib.resources.files("trainer.host") / "stacks.json").read_text("utf-8")
    return {name: Stack(name=name, **facts) for name, facts in json.loads(text).items()}


def numbers(version: str) -> list[int]:
    """Parses a version into numbers, for comparison."""
    return [int(part) for part in re.findall(r"\d+", version)]


def stack_of(lock: str, torch: str, cuda: str, stacks: Mapping[str, Stack]) -> Stack | None:
    """Returns the stack that an environment was made from: by its lock, else by torch's version and CUDA."""
    for stack in stacks.values():
        if lock == stack.lock:
            return stack
    release = torch.partition("+")[0]
    for stack in stacks.values():
        if (release, cuda) == (stack.torch, stack.cuda):
            return stack
    return None


def stack_fitting(driver: str, architectures: Iterable[str], stacks: Mapping[str, Stack]) -> str:
    """Returns the name of the newest stack for a driver and GPUs, or ""."""
    wanted = list(architectures)
    fits = [
        stack
        for stack in stacks.values()
        if numbers(driver) >= numbers(stack.floor) and all(map(stack.covers, wanted))
    ]
    best = max(fits, key=lambda stack: (numbers(stack.torch), numbers(stack.cuda)), default=None)
    return best.name if best else ""


def unsupported(stack: Stack, today: date | None = None) -> str:
    """Returns a warning if a stack's support is over, else ""."""
    if (today or date.today()) <= date.fromisoformat(stack.supported_until):
        return ""
    return f"the stack {stack.name} had fixes until {stack.supported_until}: docs/stacks.md says how to move"


_STAMP = ".bootstrap.json"


class Stamp(NamedTuple):
    """Sources that an environment was installed from.

    Attributes:
        lock: SHA-256 of its wheels.lock, or None if unknown.
        changing: Whether an installer was interrupted, so that it may hold half a package.
    """

    lock: str | None
    changing: bool


def read_stamp(prefix: Path) -> Stamp:
    """Reads it; an environment of the user's own has none."""
    try:
        found = json.loads((prefix / _STAMP).read_text())
        lock, changing = found.get("lock"), bool(found.get("changing"))
    except (OSError, ValueError, AttributeError):
        return Stamp(None, False)
    return Stamp(lock if isinstance(lock, str) else None, changing)


def lock_hash(prefix: Path) -> str | None:
    """SHA-256 of the wheels.lock that an environment was installed from; None if unknown."""
    stamp = read_stamp(prefix)
    return None if stamp.changing else stamp.lock
