"""CPUs, memory, shared memory, processes, open files: what the container grants against what a run needs.

Sources: proc(5), cgroup-v{1,2}.rst.
"""

from __future__ import annotations

import math
import os
import resource
from pathlib import Path

from trainer.commands.doctor.facts import (
    CheckResult,
    MachineFacts,
    System,
    bad,
    fine,
    unavailable,
    warning,
)
from trainer.config.sizes import GIB, MIB
from trainer.host.kernel import figures_in
from trainer.host.limits import TASKS_PER_RANK, TASKS_PER_WORKER, count_cpus, out_of_memory_kills
from trainer.host.memory_room import read_room
from trainer.host.reading import text_of
from trainer.observe.text import rough_size


def read_system(root: Path) -> System:
    """Reads the facts of the kernel.

    Args:
        root: Folder that stands for "/".
    """
    free = figures_in(text_of(root / "proc/meminfo")).get("MemAvailable", 0)
    room = read_room(root)
    left = room.limit_bytes - room.others_bytes
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return System(
        machine_cpus=count_cpus(text_of(root / "sys/devices/system/cpu/online")) or 0,
        available=min(left, free or left),
        oom_kills=out_of_memory_kills(root),
        shm=_shared(root / "dev/shm"),
        open_files=(_limit(soft), _limit(hard)),
    )


def _limit(number: int) -> float:
    return math.inf if number == resource.RLIM_INFINITY else number


def _shared(folder: Path) -> int | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize if os.access(folder, os.W_OK) else None


# NCCL's own advice for containers is 1 GiB of /dev/shm.
_SHM_OF_NCCL = GIB
# Below that a job on several GPUs was seen to fail: NCCL takes tens of MiB for each.
_SHM_LEAST = 32 * MIB
_FILES = 1024


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def quota(box: MachineFacts) -> CheckResult:
    """Compares the CPU quota with the planned ranks and loader workers."""
    cpus, needs = box.limits.cpus, box.needs
    source = box.limits.sources.get("cpus", "unknown")
    finding = f"{cpus:g} CPUs ({source}) for {_ranks(needs.ranks)}"
    if source == "sched_getaffinity" and cpus <= needs.ranks:
        return warning(
            f"{finding}; the machine has {box.system.machine_cpus}",
            "the launcher, taskset or numactl bound it: every rank, worker and thread shares them",
            "start it without taskset or numactl   (Slurm: srun --cpus-per-task=8, which srun doesn't take "
            "from sbatch)",
        )
    wanted = max(needs.ranks * (needs.workers + 1), 1)
    if cpus >= wanted:
        return fine(finding)
    if cpus < needs.ranks:
        why = "a rank has less than one CPU: steps are slow and uneven"
    else:
        finding += f" with {needs.workers} loader workers each"
        why = "workers take the time of the ranks that they should feed"
    most = min(wanted, box.system.machine_cpus)
    fewer = f"--set data.workers={max(0, math.floor(cpus / needs.ranks) - 1)}"
    more = f"docker run --cpus={most} …   (a pod: limits: {{cpu: {most}}}; or {fewer})"
    return warning(finding, why, more if most > cpus else fewer)


def memory(box: MachineFacts) -> CheckResult:
    """Compares the memory limit with the recipe's prefetch; counts earlier kills by the kernel."""
    system, limits, needs = box.system, box.limits, box.needs
    if not limits.memory_bytes:
        return unavailable("the system doesn't tell its memory")
    # A rank that has imported torch takes about 0.5 GiB, one that trains 1 to 2.
    wanted = needs.loader_bytes + needs.ranks * GIB
    source = limits.sources.get("memory_bytes", "unknown")
    finding = f"{rough_size(system.available)} of {rough_size(limits.memory_bytes)} are free ({source})"
    if system.available < wanted:
        loaders = f" and loaders of {rough_size(needs.loader_bytes)}" if needs.loader_bytes else ""
        judge = bad if system.available < wanted / 2 else warning
        return judge(
            finding,
            f"{_ranks(needs.ranks)} of about a GiB each{loaders}: the kernel kills what goes beyond",
            _more_memory(source, wanted + limits.memory_bytes - system.available),
        )
    if system.oom_kills:
        return warning(
            f"{finding}; the kernel killed {system.oom_kills} processes of this container for memory so far",
            "something in it took more than the limit",
            _more_memory(source, 2 * limits.memory_bytes),
        )
    return fine(finding)


def _more_memory(source: str, wanted: float) -> str:
    if "cgroup" not in source:  # it is the machine's: no option gives more
        return "--set data.workers=1 --set data.prefetch=1, or end what else takes memory"
    gib = math.ceil(wanted / GIB) + 1
    return f"docker run --memory={gib}g …   (a pod: limits: {{memory: {gib}Gi}}; Slurm: --mem={gib}G)"


def shared(box: MachineFacts) -> CheckResult:
    """Compares /dev/shm with what NCCL puts there; the trainer's own loader does without it."""
    total, free, gpus = box.system.shm, box.limits.shm_bytes, len(box.gpus.cards)
    give = "docker run --shm-size={0}g …   (a pod: emptyDir {{medium: Memory, sizeLimit: {0}Gi}} there)"
    if total is None:
        judge, why = bad if gpus > 1 else warning, "NCCL and other libraries' loaders need it"
        return judge("/dev/shm isn't there, or can't be written", why, give.format(1))
    finding = f"{rough_size(free)} of {rough_size(total)} in /dev/shm are free"
    if gpus < 2 or free >= _SHM_OF_NCCL:
        return fine(finding)
    judge = bad if free < _SHM_LEAST * gpus else warning
    left = "ls -l /dev/shm; rm what processes left there that are gone"
    remedy = left if total >= 2 * _SHM_OF_NCCL else give.format(math.ceil((total - free + GIB) / GIB))
    return judge(finding, f"NCCL wants about 1 GiB for {gpus} GPUs", remedy)


def pids(box: MachineFacts) -> CheckResult:
    """Compares the limit of processes and threads with the run's."""
    most, needs = box.limits.pids, box.needs
    wanted = needs.ranks * (TASKS_PER_RANK + TASKS_PER_WORKER * needs.workers)
    if most is None:
        return fine("processes aren't limited by a cgroup")
    if most >= wanted:
        return fine(f"{most} processes and threads may run")
    judge = bad if most < wanted / 2 else warning
    return judge(
        f"{most} processes and threads at most ({box.limits.sources.get('pids', 'pids.max')})",
        f"{_ranks(needs.ranks)} with {needs.workers} workers each take up to about {wanted}: the next fails",
        f"docker run --pids-limit={max(4096, 2 * wanted)} …   (a node's kubelet: podPidsLimit; slurmd and "
        "systemd: TasksMax)",
    )


def open_files(box: MachineFacts) -> CheckResult:
    """Limit of open files."""
    soft, hard = box.system.open_files
    finding = f"open files: {soft}"
    if soft >= _FILES:
        return fine(finding)
    return warning(
        finding,
        "each rank holds sockets, shards and two pipes for each loader worker; then 'Too many open files'",
        f"ulimit -n {min(hard, 65536)}   (in a batch script before srun)"
        if hard >= _FILES
        else "docker run --ulimit nofile=65536:65536 …   (the hard limit is that low, too)",
    )


RESOURCE_CHECKS = (
    ("memory.limit", memory),
    ("cpu.quota", quota),
    ("shm.size", shared),
    ("pids.limit", pids),
    ("ulimit.nofile", open_files),
)
