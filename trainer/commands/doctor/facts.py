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
Environment = Literal["container", "kubernetes", "slurm", "host"]


@dataclass(frozen=True)
class CheckResult:
    """Result of a check.

    Attributes:
        status: ok, warn (training works, degraded), bad (it fails or computes wrongly), not available.
        finding: The observed state, in one line; the reason if not available.
        cause: Why that matters; empty if all is well.
        remedies: The command or line to write, by place; the host's also serves places without one.
    """

    status: Status
    finding: str
    cause: str = ""
    remedies: Mapping[str, str] = field(default_factory=dict)

    def remedy(self, place: Environment) -> str:
        """Returns the remedy for this place."""
        return self.remedies.get(place) or self.remedies.get("host", "")


def fine(finding: str) -> CheckResult:
    """Result: ok."""
    return CheckResult("ok", finding)


def warning(finding: str, cause: str, **remedies: str) -> CheckResult:
    """Result: training works but is degraded."""
    return CheckResult("warn", finding, cause, remedies)


def bad(finding: str, cause: str, **remedies: str) -> CheckResult:
    """Result: training fails, or computes wrongly."""
    return CheckResult("bad", finding, cause, remedies)


def unavailable(reason: str) -> CheckResult:
    """Result: this can't be examined here, or there is nothing to examine."""
    return CheckResult("not available", reason)


def some(words: Iterable[str], most: int = 4) -> str:
    """Joins the first few entries of a list."""
    listed = list(words)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def variable(name: str, value: str) -> dict[str, str]:
    """Returns the remedy that sets an environment variable, by place."""
    return {
        "container": f"docker run -e {name}={value} …",
        "kubernetes": f"env: [{{name: {name}, value: '{value}'}}]",
        "host": f"export {name}={value}" if value else f"unset {name}",
    }


def pod_volume(name: str, source: str, path: str) -> str:
    """Returns the lines of a pod that mount a volume, as one.

    Args:
        name: Name of the volume.
        source: Its source, such as "emptyDir: {}".
        path: The mount point.
    """
    mounts = f"containers: [{{volumeMounts: [{{name: {name}, mountPath: {path}}}]}}]"
    return f"spec: {{volumes: [{{name: {name}, {source}}}], {mounts}}}"


@dataclass(frozen=True)
class Card:
    """A GPU that the job may use, as NVML describes it."""

    index: int  # NVML's number
    name: str  # the model
    architecture: str = ""  # such as sm_90; "" if unknown
    total: int = 0  # bytes of memory
    used: int = 0  # bytes in use
    data_center: bool = True  # whether forward compatibility may work with it
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
    cards: tuple[Card, ...] = ()  # GPUs that the job may use
    wrong: str = ""  # first word of CUDA_VISIBLE_DEVICES that names no GPU, or ""
    # versions of libcuda in folders of forward compatibility that the loader searches first
    compat: tuple[str, ...] = ()


@dataclass(frozen=True)
class System:
    """Limits and features of the kernel, and the user of the process."""

    machine_cpus: int = 1  # CPUs of the machine
    # fraction of the quota's periods so far in which the container was throttled; None: no quota
    throttled: float | None = None
    available: int = 0  # bytes of memory that are free or can be reclaimed, within the limit
    oom_kills: int = 0  # processes of this cgroup killed so far because memory was full
    overcommit: int = 0  # vm.overcommit_memory
    commit_left: int = 0  # bytes that can still be reserved, where overcommit is 2
    ipc_lock: bool = False  # whether this process may lock memory beyond its limit
    shm: int | None = None  # size of /dev/shm in bytes; None: it is missing or can't be written
    # soft limits by name (nofile, nproc, memlock); infinity is -1
    rlimits: Mapping[str, int] = field(default_factory=dict)
    uid: int = 0  # user number
    user: str = ""  # its name in the password file; "" if it has none
    home_error: str = ""  # error of writing to $HOME, or ""


@dataclass(frozen=True)
class Software:
    """Installed packages."""

    # version of each distribution, by canonical name
    installed: Mapping[str, str] = field(default_factory=dict)
    twice: tuple[str, ...] = ()  # distributions installed in several versions
    torch: str = ""  # torch's version, from its files; "" without torch
    cuda: str = ""  # the CUDA that torch is built for; "" for none
    # exact versions that torch requires, by canonical name
    wanted: Mapping[str, str] = field(default_factory=dict)
    lock: str = ""  # SHA-256 of the lock that this environment was installed from; "" if unknown
    changing: bool = False  # whether an installer was interrupted
    leaked: tuple[str, ...] = ()  # distributions in the user's own site-packages, if Python looks there
    shadowed: tuple[str, ...] = ()  # packages that PYTHONPATH puts before the installed ones, with the folder
    searched: tuple[str, ...] = ()  # CUDA, cuDNN and NCCL libraries in LD_LIBRARY_PATH or LD_PRELOAD
    uncompiled: str = ""  # compiler or headers that torch.compile lacks; "" if none

    def stack(self) -> Stack | None:
        """Returns the stack that the environment was made from, or one with the same torch."""
        return stack_of(self.lock, self.torch, self.cuda, read_stacks())


@dataclass(frozen=True)
class Network:
    """Interfaces and libraries by which ranks communicate."""

    interfaces: tuple[str, ...] = ()  # names, without loopback
    infiniband: tuple[str, ...] = ()  # active ports in /sys/class/infiniband
    verbs: bool = False  # whether /dev/infiniband has a device that this user may open
    peer_memory: bool = False  # whether the kernel lets InfiniBand reach GPU memory (nvidia_peermem)
    # devices that libibverbs lists; None: it can't be loaded, or no port is active
    listed: tuple[str, ...] | None = None


@dataclass(frozen=True)
class RecipeNeeds:
    """Requirements of a recipe."""

    recipe: str = ""  # its name; "" if none was given
    workers: int = 0  # loader workers per rank
    prefetch: int = 4  # batches that a loader worker prepares ahead
    batch_bytes: int = 0  # bytes of a micro-batch in uint8
    loader_bytes: int = 0  # memory of all ranks' loaders, processes included
    compiles: bool = False  # whether it uses torch.compile
    ranks: int = 1  # processes on this host

    @property
    def ahead(self) -> int:
        """Bytes that all loader workers prepare ahead: a plain DataLoader puts them into /dev/shm."""
        return self.ranks * self.workers * self.prefetch * self.batch_bytes


@dataclass(frozen=True)
class MachineFacts:
    """All facts."""

    environ: Mapping[str, str]
    limits: Limits
    gpus: Gpus
    system: System
    folders: Mapping[str, Folder]
    caches: Mapping[str, Folder]
    data: Data
    software: Software
    network: Network
    needs: RecipeNeeds
