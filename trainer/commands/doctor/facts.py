"""Facts that the doctor reads, and results of its checks.

Each module by subject has a reader, which looks at the machine, and checks, which are pure functions of
`MachineFacts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from trainer.host.disks import Data, Folder
from trainer.host.limits import Limits
from trainer.host.stacks import Stack, read_stacks, stack_of

Status = Literal["ok", "warn", "bad", "not available"]


@dataclass(frozen=True)
class CheckResult:
    """Result of a check.

    Attributes:
        status: ok, warn (training works, degraded), bad (it fails or computes wrongly), not available.
        finding: The observed state, in one line; the reason if not available.
        cause: Why that matters; empty if all is well.
        remedy: The command or line to write.
    """

    status: Status
    finding: str
    cause: str = ""
    remedy: str = ""


def fine(finding: str) -> CheckResult:
    """Result: ok."""
    return CheckResult("ok", finding)


def warning(finding: str, cause: str, remedy: str) -> CheckResult:
    """Result: training works but is degraded."""
    return CheckResult("warn", finding, cause, remedy)


def bad(finding: str, cause: str, remedy: str) -> CheckResult:
    """Result: training fails, or computes wrongly."""
    return CheckResult("bad", finding, cause, remedy)


def unavailable(reason: str) -> CheckResult:
    """Result: this can't be examined here, or there is nothing to examine."""
    return CheckResult("not available", reason)


def some(words: Iterable[str], most: int = 4) -> str:
    """Joins the first few entries of a list."""
    listed = list(words)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


@dataclass(frozen=True)
class Card:
    """A GPU that the job may use, as NVML describes it."""

    name: str  # the model
    architecture: str = ""  # such as sm_90; "" if unknown
    lost: str = ""  # error if it doesn't answer, else ""


@dataclass(frozen=True)
class Gpus:
    """NVIDIA's driver and GPUs."""

    problem: str = ""  # error of NVML's start, or ""
    code: int = 0  # NVML's error code, or 0
    driver: str = ""  # version of the driver's library
    # version of the loaded kernel module, visible in a container without GPUs too; or ""
    kernel: str = ""
    nodes: bool = False  # whether /dev/nvidiactl exists
    unsearched: str = ""  # folder with NVML's library that the loader doesn't search (GKE's), or ""
    cards: tuple[Card, ...] = ()  # GPUs that the job may use
    wrong: str = ""  # first word of CUDA_VISIBLE_DEVICES that names no GPU, or ""


@dataclass(frozen=True)
class System:
    """Limits of the kernel."""

    available: int = 0  # bytes of memory that are free or can be reclaimed, within the limit
    oom_kills: int = 0  # processes of this cgroup killed so far because memory was full
    shm: int | None = None  # size of /dev/shm in bytes; None: it is missing or can't be written


@dataclass(frozen=True)
class Software:
    """Installed packages."""

    # version of each distribution, by canonical name
    installed: Mapping[str, str] = field(default_factory=dict)
    twice: tuple[str, ...] = ()  # distributions installed in several versions
    torch: str = ""  # torch's version, from its files; "" without torch
    cuda: str = ""  # the CUDA that torch is built for; "" for none
    lock: str = ""  # SHA-256 of the lock that this environment was installed from; "" if unknown
    changing: bool = False  # whether an installer was interrupted
    shadowed: tuple[str, ...] = ()  # packages that come before the installed ones, with their folder
    searched: tuple[str, ...] = ()  # CUDA, cuDNN and NCCL libraries in LD_LIBRARY_PATH or LD_PRELOAD

    def stack(self) -> Stack | None:
        """Returns the stack that the environment was made from, or one with the same torch."""
        return stack_of(self.lock, self.torch, self.cuda, read_stacks())


@dataclass(frozen=True)
class RecipeNeeds:
    """Requirements of a recipe."""

    recipe: str = ""  # its name; "" if none was given
    workers: int = 0  # loader workers per rank
    loader_bytes: int = 0  # memory of all ranks' loaders, processes included
    ranks: int = 1  # processes on this host


@dataclass(frozen=True)
class MachineFacts:
    """All facts."""

    environ: Mapping[str, str]
    limits: Limits
    gpus: Gpus
    system: System
    run: Folder  # the run folder
    caches: Mapping[str, Folder]  # by environment variable, or key of the recipe
    data: Data
    software: Software
    interfaces: tuple[str, ...]  # network interfaces, without loopback
    needs: RecipeNeeds
