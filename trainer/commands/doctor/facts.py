"""What the doctor read of the box, as values, and what a check makes of them.

Reading and judging are apart: the modules by subject hold a reader, which looks at the box, and checks, which
are pure functions of a `Box`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from trainer.host.disks import Data, Folder
from trainer.host.limits import Limits

Status = Literal["ok", "warn", "bad", "not available"]

MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        status: ok, warn (it trains, but), bad (it won't, or wrongly), not available (with the reason).
        finding: What there is, in one line.
        cause: Why that matters; empty if all is well.
        remedy: The line to write, by where it is written: docker, compose, kubernetes, slurm, host.
    """

    status: Status
    finding: str
    cause: str = ""
    remedy: Mapping[str, str] = field(default_factory=dict)


def fine(finding: str) -> Finding:
    """Nothing wrong."""
    return Finding("ok", finding)


def warn(finding: str, cause: str, **remedy: str) -> Finding:
    """It trains, but."""
    return Finding("warn", finding, cause, remedy)


def bad(finding: str, cause: str, **remedy: str) -> Finding:
    """It won't train, or not right."""
    return Finding("bad", finding, cause, remedy)


def unavailable(reason: str) -> Finding:
    """It can't be looked at here, or there is nothing to look at."""
    return Finding("not available", reason)


@dataclass(frozen=True)
class Card:
    """A GPU that the job may use, as NVML tells.

    Attributes:
        index: NVML's number.
        name: The model.
        architecture: Such as sm_90; "" if it doesn't tell.
        total: Bytes of memory.
        used: Bytes of it that are taken.
        node: The NUMA node that it hangs on; -1 if there is one only.
        data_centre: Whether forward compatibility may work with it.
        lost: Why it doesn't answer; "" if it does.
    """

    index: int
    name: str
    architecture: str = ""
    total: int = 0
    used: int = 0
    node: int = -1
    data_centre: bool = True
    lost: str = ""


@dataclass(frozen=True)
class Gpus:
    """NVIDIA's driver and GPUs.

    Attributes:
        problem: What NVML said when it was started; "" if it started.
        code: NVML's number of that, 0 if it started.
        driver: The version in use by NVML.
        kernel: The version of the loaded kernel module, which a container without GPUs sees as well; "".
        nodes: Whether /dev/nvidiactl is there.
        cards: Those that the job may use.
        wrong: The first word of CUDA_VISIBLE_DEVICES that names no GPU; "".
        compat: Versions of libcuda in folders of forward compatibility that the loader searches first.
        peers: Pairs of cards that can't reach each other's memory, with the reason.
    """

    problem: str = ""
    code: int = 0
    driver: str = ""
    kernel: str = ""
    nodes: bool = False
    cards: tuple[Card, ...] = ()
    wrong: str = ""
    compat: tuple[str, ...] = ()
    peers: tuple[tuple[int, int, str], ...] = ()


@dataclass(frozen=True)
class System:
    """What the kernel grants and does.

    Attributes:
        machine_cpus: CPUs of the machine.
        allowed_cpus: Those on which this process may run.
        nodes: CPUs of each NUMA node.
        throttled: Share of the quota's periods so far in which it stopped the container; None: no quota.
        available: Bytes of memory that are free or could be, within the limit.
        oom_kills: Processes of this cgroup that were killed for memory so far.
        swap_total: Bytes of swap space.
        swapped: Bytes in it.
        overcommit: vm.overcommit_memory.
        commit_left: Bytes that may still be promised, where overcommit is 2.
        locked: Bytes that a real mlock could lock, of those tried; None where nothing was tried.
        tried: Bytes that were tried.
        shm: Size of /dev/shm in bytes; None: it isn't there or can't be written.
        rlimits: Soft limits by name (nofile, nproc, stack, core, memlock); infinity is -1.
        core_pattern: Where cores go.
    """

    machine_cpus: int = 1
    allowed_cpus: frozenset[int] = frozenset()
    nodes: Mapping[int, frozenset[int]] = field(default_factory=dict)
    throttled: float | None = None
    available: int = 0
    oom_kills: int = 0
    swap_total: int = 0
    swapped: int = 0
    overcommit: int = 0
    commit_left: int = 0
    locked: int | None = None
    tried: int = 0
    shm: int | None = None
    rlimits: Mapping[str, int] = field(default_factory=dict)
    core_pattern: str = ""


@dataclass(frozen=True)
class Software:
    """Python and the packages.

    Attributes:
        python: Version, such as 3.12.4.
        installed: Version of each distribution, by canonical name.
        twice: Distributions of which there are several versions.
        torch: torch's own version, from its files; "" if it isn't there.
        cuda: The CUDA that torch is built for; "" for none.
        wanted: Exact versions that torch says it needs, by canonical name.
        lock: SHA-256 of the lock that this environment was installed from; "" if nobody knows.
        changing: Whether an installer was interrupted.
        leaked: Distributions in the user's own site-packages, if Python looks there.
        shadowed: Packages that PYTHONPATH puts before the installed ones, with the folder.
        searched: CUDA, cuDNN and NCCL libraries in LD_LIBRARY_PATH or LD_PRELOAD.
        compiler: What torch.compile lacks of a compiler; "" if nothing.
        headers: What it lacks of Python's headers; "" if nothing.
    """

    python: str = ""
    installed: Mapping[str, str] = field(default_factory=dict)
    twice: tuple[str, ...] = ()
    torch: str = ""
    cuda: str = ""
    wanted: Mapping[str, str] = field(default_factory=dict)
    lock: str = ""
    changing: bool = False
    leaked: tuple[str, ...] = ()
    shadowed: tuple[str, ...] = ()
    searched: tuple[str, ...] = ()
    compiler: str = ""
    headers: str = ""


@dataclass(frozen=True)
class Network:
    """What ranks, and people's browsers, come through.

    Attributes:
        interfaces: Names, without loopback.
        host: This host's name.
        resolves: Whether it has an address; None if that took too long.
        taken: Ports of 127.0.0.1 that somebody listens on, by what they are wanted for.
        infiniband: Active ports in /sys/class/infiniband.
        verbs: Whether /dev/infiniband has a device that this user may open.
        peer_memory: Whether the kernel lets InfiniBand reach GPU memory (nvidia_peermem).
        listed: Devices that libibverbs lists; None: it can't be loaded, or no port is active.
    """

    interfaces: tuple[str, ...] = ()
    host: str = ""
    resolves: bool | None = True
    taken: Mapping[str, int] = field(default_factory=dict)
    infiniband: tuple[str, ...] = ()
    verbs: bool = False
    peer_memory: bool = False
    listed: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Session:
    """Who runs it, where and when.

    Attributes:
        uid: User number.
        name: From the password file; "" if it has none.
        home: $HOME.
        home_error: Why that can't be written; "".
        time: Seconds since 1970.
        synchronised: Whether the kernel's clock is kept right; None if it doesn't tell.
        zone_error: What is wrong with TZ; "".
        encoding: Of file names.
        locale_error: What is wrong with the locale; "".
    """

    uid: int = 0
    name: str = ""
    home: str = ""
    home_error: str = ""
    time: float = 0.0
    synchronised: bool | None = None
    zone_error: str = ""
    encoding: str = "utf-8"
    locale_error: str = ""


@dataclass(frozen=True)
class Plan:
    """What of a recipe the box must bear.

    Attributes:
        recipe: Its name; "" if none was given.
        workers: Loader workers per rank.
        prefetch: Batches that each prepares ahead.
        batch_bytes: Of a micro-batch, in uint8.
        loader_bytes: What the loaders of all ranks take of memory, processes included.
        compiles: Whether it uses torch.compile.
        ranks: Processes on this host.
    """

    recipe: str = ""
    workers: int = 0
    prefetch: int = 4
    batch_bytes: int = 0
    loader_bytes: int = 0
    compiles: bool = False
    ranks: int = 1

    @property
    def ahead(self) -> int:
        """Bytes that the workers of all ranks prepare ahead: a plain DataLoader puts them into /dev/shm."""
        return self.ranks * self.workers * self.prefetch * self.batch_bytes


@dataclass(frozen=True)
class Box:
    """All that was read."""

    environ: Mapping[str, str]
    limits: Limits
    gpus: Gpus
    system: System
    folders: Mapping[str, Folder]
    caches: Mapping[str, Folder]
    data: Data
    software: Software
    network: Network
    session: Session
    plan: Plan
