"""CPU affinity: each rank of this host keeps to CPUs near its GPU, or to its part of the CPUs.

torchrun's --numa-binding (PyTorch 2.8 on) does the first for GPUs. This does it with every version, also for
a single rank and for ranks on CPUs, and without starting CUDA in the launcher. A rank binds itself before it
allocates anything, so its memory comes from its node: Linux takes it near the CPU that first writes to it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.host.limits import Limits, allowed_cpus, keep_to, listed_cpus

if TYPE_CHECKING:  # pydantic takes longer to import than all the rest, and a rank binds itself first
    from trainer.config.training import Binding

Cpus = frozenset[int]


@dataclass(frozen=True)
class CpuShares:
    """CPUs that the ranks of this host keep to.

    Attributes:
        each: The CPUs of each, by its local rank; empty if none is bound.
        pinned: Whether a rank's OpenMP threads are pinned, each to one of them.
    """

    each: tuple[Cpus, ...] = ()
    pinned: bool = False

    def of(self, local_rank: int) -> Cpus:
        """Returns the CPUs of one rank; empty if it is not bound."""
        return self.each[local_rank] if local_rank < len(self.each) else frozenset()


@dataclass(frozen=True)
class Topology:
    """The CPUs that this container may use, and where they are.

    Attributes:
        nodes: Of each NUMA node that has some of them, its CPUs.
        cores: For each CPU, the CPUs of its core that may be used: more than one with hyper-threading.
    """

    nodes: Mapping[int, Cpus]
    cores: Mapping[int, Cpus]


def read_topology(root: Path = Path("/"), allowed: Cpus | None = None) -> Topology:
    """Reads the topology from Linux; without it, all CPUs are of one node and each is a core.

    Args:
        root: Folder that stands for "/".
        allowed: CPUs that may be used; by default as the scheduler says.
    """
    allowed = allowed_cpus() if allowed is None else allowed
    nodes = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        if cpus := _cpus(folder / "cpulist") & allowed:
            nodes[int(folder.name.removeprefix("node"))] = cpus
    near = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    cores = {cpu: (_cpus(root / near.format(cpu)) & allowed) or frozenset((cpu,)) for cpu in allowed}
    return Topology(dict(sorted(nodes.items())) or {0: allowed}, cores)


def gpu_nodes(bus_ids: Sequence[str], root: Path = Path("/")) -> list[int | None]:
    """The NUMA node of each GPU; None where it is unknown.

    Args:
        bus_ids: As NVML writes them, "00000000:3B:00.0"; "" where it doesn't tell.
        root: Folder that stands for "/".
    """
    places: list[int | None] = []
    for bus_id in bus_ids:
        domain, _, rest = bus_id.lower().partition(":")
        file = root / "sys/bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node"
        try:
            node = int(file.read_text())
        except (OSError, ValueError):
            node = -1
        places.append(node if node >= 0 else None)
    return places


def share_cpus(binding: Binding, topology: Topology, places: Sequence[int | None]) -> CpuShares:
    """The CPUs of each rank of this host.

    Args:
        binding: node: those of the rank's NUMA node. cores: whole cores of its own there. auto: node, where
            there are several and it matters.
        topology: What may be used.
        places: For each rank, the node of its GPU; None for a rank without, which gets one in turn.
    """
    nodes = list(topology.nodes)
    known = any(place in nodes for place in places)
    if binding == "auto":
        binding = "node" if len(nodes) > 1 and (len(places) > 1 or known) else "none"
    if binding == "none":
        return CpuShares()
    homes = [
        place if place is not None and place in nodes else nodes[rank * len(nodes) // len(places)]
        for rank, place in enumerate(places)
    ]
    if binding == "node":
        return CpuShares(tuple(topology.nodes[home] for home in homes))
    own = (
        _cores(topology, home, homes[:rank].count(home), homes.count(home)) for rank, home in enumerate(homes)
    )
    return CpuShares(tuple(own), pinned=True)


def _cores(topology: Topology, node: int, number: int, of: int) -> Cpus:
    """The part of a node's cores for one of its ranks; all of them if there are fewer cores than ranks."""
    cores = sorted({tuple(sorted(topology.cores[cpu])) for cpu in topology.nodes[node]})
    part = cores[len(cores) * number // of : len(cores) * (number + 1) // of] if len(cores) >= of else cores
    return frozenset(cpu for core in part for cpu in core) & topology.nodes[node]


def limits_within(limits: Limits, shares: CpuShares) -> Limits:
    """Limits with no more CPUs than ranks have that keep to these: the poorest of them decides."""
    if not shares.each:
        return limits
    cpus = len(shares.each) * min(len(share) / shares.each.count(share) for share in shares.each)
    if cpus >= limits.cpus:
        return limits
    return replace(limits, cpus=cpus, sources={**limits.sources, "cpus": "parallel.cpu_binding"})


def bind(shares: CpuShares, environ: MutableMapping[str, str] = os.environ) -> None:
    """Lets this rank keep to its CPUs, before anything starts threads; nothing if it has none.

    With cores of its own its OpenMP threads are pinned to them, too (libgomp's and LLVM's variables), unless
    the user has said how.
    """
    cpus = shares.of(int(environ.get("LOCAL_RANK", "0")))
    if not cpus:
        return
    keep_to(cpus)
    if shares.pinned and not any(
        name in environ for name in ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES")
    ):
        environ["GOMP_CPU_AFFINITY"] = cpus_text(cpus)
        environ["KMP_AFFINITY"] = f"granularity=fine,proclist=[{cpus_text(cpus)}],explicit"


def unpin_main_thread(shares: CpuShares) -> None:
    """Gives this thread all the rank's CPUs back: libgomp pins it, and what it forks would stay on one."""
    if cpus := shares.of(int(os.environ.get("LOCAL_RANK", "0"))):
        keep_to(cpus)


def binding_note(shares: CpuShares) -> str:
    """A line for the user on what each rank of this host is bound to; empty if none is."""
    if not shares.each:
        return ""
    who = "the rank" if len(shares.each) == 1 else "ranks"
    pinned = ", OpenMP's threads pinned" if shares.pinned else ""
    return f"CPUs: {who} on {' | '.join(map(cpus_text, shares.each))}{pinned} (parallel.cpu_binding)"


def cpus_text(cpus: Cpus) -> str:
    """CPUs as the kernel lists them, "0-3,8"."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _cpus(file: Path) -> Cpus:
    try:
        return frozenset(listed_cpus(file.read_text().strip()) or ())
    except OSError:
        return frozenset()
