"""The pinned stacks, from the table that `scripts/stack_table.py` makes of stacks/*/stack.toml and locks."""

from __future__ import annotations

import importlib.resources
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trainer.commands.doctor.facts import Gpus, Software


@dataclass(frozen=True)
class Stack:
    """A set of versions that fit together.

    Attributes:
        name: Folder of stacks/.
        conda: Whether PyTorch comes from conda, and not as a wheel.
        torch: Its version, and so on for the others.
        torchvision: …
        torchaudio: …
        cuda: …
        cudnn: …
        nccl: …
        architectures: GPUs that torch has code for, such as sm_90.
        native: Driver from which everything works.
        floor: Driver from which it works but for JIT of PTX.
        made: Day of the locks, in seconds since 1970.
        lock: SHA-256 of wheels.lock.
        wheels: Version of each locked wheel that training needs; several where they depend on the Python.
    """

    name: str
    conda: bool
    torch: str
    torchvision: str
    torchaudio: str
    cuda: str
    cudnn: str
    nccl: str
    architectures: list[str]
    native: str
    floor: str
    made: int
    lock: str
    wheels: Mapping[str, str]

    def covers(self, architecture: str) -> bool:
        """Whether it has code for a GPU (sm_86): of its generation, and not newer."""
        wanted = divmod(int(architecture[3:]), 10)
        has = [divmod(int(one[3:]), 10) for one in self.architectures]
        return any(one[0] == wanted[0] and one[1] <= wanted[1] for one in has)

    def runs(self, driver: str, architectures: Iterable[str]) -> bool:
        """Whether a driver is new enough and every GPU has code."""
        return numbers(driver) >= numbers(self.floor) and all(self.covers(one) for one in architectures)


def read_stacks() -> dict[str, Stack]:
    """Every stack by its name."""
    text = (importlib.resources.files("trainer.commands.doctor") / "stacks.json").read_text("utf-8")
    return {name: Stack(name=name, **facts) for name, facts in json.loads(text).items()}


def numbers(version: str) -> list[int]:
    """A version to compare by."""
    return [int(part) for part in re.findall(r"\d+", version)]


def stack_of(software: Software, stacks: Mapping[str, Stack]) -> Stack | None:
    """The stack that an environment was made from: by its lock, else by torch's version and CUDA."""
    for stack in stacks.values():
        if software.lock == stack.lock:
            return stack
    release = software.torch.partition("+")[0]
    for stack in stacks.values():
        if (release, software.cuda) == (stack.torch, stack.cuda):
            return stack
    return None


def fitting(gpus: Gpus, stacks: Mapping[str, Stack]) -> Stack | None:
    """The newest stack for a driver and the GPUs that there are."""
    architectures = {card.architecture for card in gpus.cards if card.architecture}
    fits = [stack for stack in stacks.values() if stack.runs(gpus.driver, architectures)]
    return max(fits, key=lambda stack: (numbers(stack.torch), numbers(stack.cuda)), default=None)
