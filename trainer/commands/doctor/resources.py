"""CPUs, memory, shared memory, ulimits, the user: what the container grants against what a run needs.

Sources: proc(5), cgroup-v{1,2}.rst.
"""

from __future__ import annotations

import math
import os
import pwd
import re
import resource
from collections.abc import Mapping
from pathlib import Path

from trainer.commands.doctor.facts import (
    CheckResult,
    MachineFacts,
    System,
    bad,
    fine,
    pod_volume,
    unavailable,
    variable,
    warning,
)
from trainer.config.sizes import GIB, MIB
from trainer.host.kernel import figures_in
from trainer.host.limits import TASKS_PER_RANK, TASKS_PER_WORKER, Limits, count_cpus, out_of_memory_kills
from trainer.host.memory_room import read_room
from trainer.host.reading import kind_of, text_of
from trainer.host.stacks import numbers
from trainer.observe.text import rough_size

_IPC_LOCK = 14  # the number of the capability, linux/capability.h


def read_system(root: Path, limits: Limits, environ: Mapping[str, str]) -> System:
    """Reads the facts of the kernel.

    Args:
        root: Folder that stands for "/".
        limits: Limits of the container below `root`.
        environ: Environment variables: HOME.
    """
    memory = figures_in(text_of(root / "proc/meminfo"))
    available = _room(root, memory.get("MemAvailable", 0))
    status = text_of(root / "proc/self/status")
    capabilities = re.search(r"^CapEff:\s+([0-9a-f]+)$", status, re.MULTILINE)
    overcommit = text_of(root / "proc/sys/vm/overcommit_memory")
    return System(
        machine_cpus=count_cpus(text_of(root / "sys/devices/system/cpu/online")) or 0,
        throttled=_throttled(root, limits),
        available=available,
        oom_kills=out_of_memory_kills(root),
        overcommit=int(overcommit) if overcommit.isdecimal() else 0,
        commit_left=memory.get("CommitLimit", 0) - memory.get("Committed_AS", 0),
        ipc_lock=bool(capabilities and int(capabilities[1], 16) & 1 << _IPC_LOCK),
        shm=_shared(root / "dev/shm"),
        rlimits=_rlimits(),
        uid=os.getuid(),
        user=_user(os.getuid()),
        home_error=_home_error(environ.get("HOME", "")),
    )


def _room(root: Path, free: int) -> int:
    """Returns the bytes that are free below the memory limit and in the machine."""
    room = read_room(root)
    left = room.limit_bytes - room.others_bytes
    return min(left, free or left)


def _throttled(root: Path, limits: Limits) -> float | None:
    source = root / limits.sources.get("cpus", "").lstrip("/")
    if source.name not in ("cpu.max", "cpu.cfs_quota_us"):
        return None
    counts = figures_in(text_of(source.with_name("cpu.stat")))
    periods = counts.get("nr_periods", 0)
    return counts.get("nr_throttled", 0) / periods if periods else 0.0


def _shared(folder: Path) -> int | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize if os.access(folder, os.W_OK) else None


def _rlimits() -> dict[str, int]:
    found = {}
    for name in ("nofile", "nproc", "memlock"):
        if (number := getattr(resource, f"RLIMIT_{name.upper()}", None)) is not None:
            soft = resource.getrlimit(number)[0]
            found[name] = -1 if soft == resource.RLIM_INFINITY else soft
    return found


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return ""


def _home_error(home: str) -> str:
    if not home:
        return "HOME isn't set"
    if kind_of(home) != "folder":
        return f"HOME={home} isn't there"
    return "" if os.access(home, os.W_OK | os.X_OK) else f"HOME={home} can't be written"


# NCCL's own advice for containers is 1 GiB of /dev/shm.
_SHM_OF_NCCL = GIB
# Below that a job on several GPUs was seen to fail: NCCL takes tens of MiB for each.
_SHM_LEAST = 32 * MIB


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def _tasks(box: MachineFacts) -> int:
    """Returns the number of processes and threads that the run starts."""
    return box.needs.ranks * (TASKS_PER_RANK + TASKS_PER_WORKER * box.needs.workers)


def quota(box: MachineFacts) -> CheckResult:
    """Compares the CPU quota with the planned ranks and loader workers, and reads whether it throttled."""
    cpus, needs, throttled = box.limits.cpus, box.needs, box.system.throttled
    wanted = max(needs.ranks * (needs.workers + 1), 1)
    remedies = {"host": f"--set data.workers={max(0, math.floor(cpus / needs.ranks) - 1)}"}
    most = min(wanted, box.system.machine_cpus)
    if most > cpus:
        remedies |= {
            "container": f"docker run --cpus={most} …",
            "kubernetes": f'resources: {{requests: {{cpu: "{most}"}}, limits: {{cpu: "{most}"}}}}',
            "slurm": f"#SBATCH --cpus-per-task={max(1, most // needs.ranks)}",
        }
    source = box.limits.sources.get("cpus", "unknown")
    finding = f"{cpus:g} CPUs ({source})"
    if source == "sched_getaffinity" and cpus <= needs.ranks:
        return warning(
            f"{finding} of the machine's {box.system.machine_cpus}",
            "the launcher, taskset or numactl bound it: every rank, worker and thread shares them",
            slurm="#SBATCH --cpus-per-task=8, and srun --cpus-per-task=8 (srun doesn't take it from sbatch)",
            host="start it without taskset or numactl",
        )
    if cpus < needs.ranks:
        why = "a rank has less than one CPU: steps are slow and uneven"
        return warning(f"{finding} for {_ranks(needs.ranks)}", why, **remedies)
    if cpus < wanted:
        return warning(
            f"{finding} for {_ranks(needs.ranks)} with {needs.workers} loader workers each",
            "workers take the time of the ranks that they should feed",
            **remedies,
        )
    if throttled is not None and throttled > 0.1:
        cores = math.ceil(cpus)
        return warning(
            f"{finding}; the quota stopped this container in {throttled:.0%} of its periods so far",
            "more threads run than the quota pays for, and all of them are stopped together",
            container=f"docker run --cpuset-cpus=0-{cores - 1} …   (instead of --cpus)",
            kubernetes=f'resources: {{limits: {{cpu: "{cores}"}}}}   (cores ones: static CPU manager)',
            slurm=f"#SBATCH --cpus-per-task={cores}",
            host="OMP_NUM_THREADS=… of programs that don't ask for the limits; trainer train does",
        )
    return fine(finding)


def memory_limit(box: MachineFacts) -> CheckResult:
    """Compares the memory limit with the recipe's prefetch; counts earlier kills by the kernel."""
    system, limits, needs = box.system, box.limits, box.needs
    if not limits.memory_bytes:
        return unavailable("the system doesn't tell its memory")
    # A rank that has imported torch takes about 0.5 GiB, one that trains 1 to 2.
    wanted = needs.loader_bytes + needs.ranks * GIB
    source = limits.sources.get("memory_bytes", "unknown")
    finding = f"{rough_size(system.available)} of {rough_size(limits.memory_bytes)} are free"
    if system.available < wanted:
        loaders = f" and loaders of {rough_size(needs.loader_bytes)}" if needs.loader_bytes else ""
        judge = bad if system.available < wanted / 2 else warning
        return judge(
            f"{finding} ({source})",
            f"{_ranks(needs.ranks)} of about a GiB each{loaders}: the kernel kills what goes beyond",
            **_more_memory(source, wanted + limits.memory_bytes - system.available),
        )
    if system.oom_kills:
        return warning(
            f"{finding}; the kernel killed {system.oom_kills} processes of this container for memory so far",
            "something in it took more than the limit",
            **_more_memory(source, 2 * limits.memory_bytes),
        )
    return fine(finding)


def _more_memory(source: str, wanted: float) -> dict[str, str]:
    less = {"host": "--set data.workers=1 --set data.prefetch=1, or end what else takes memory"}
    if "cgroup" not in source:  # it is the machine's: no option gives more
        return less
    gib = math.ceil(wanted / GIB) + 1
    return {
        "container": f"docker run --memory={gib}g …",
        "kubernetes": f"resources: {{requests: {{memory: {gib}Gi}}, limits: {{memory: {gib}Gi}}}}",
        "slurm": f"#SBATCH --mem={gib}G",
        **less,
    }


def overcommit(box: MachineFacts) -> CheckResult:
    """Checks whether the kernel refuses memory that is reserved but not used."""
    system = box.system
    if system.overcommit == 2 and system.commit_left < 16 * GIB:
        return warning(
            f"vm.overcommit_memory=2, and {rough_size(max(0, system.commit_left))} may still be reserved",
            "CUDA reserves as much address space as there is memory; a loader worker, as much as its rank",
            host="on the host: sudo sysctl vm.overcommit_memory=0",
        )
    return fine(f"vm.overcommit_memory={system.overcommit}")


def memlock(box: MachineFacts) -> CheckResult:
    """Checks whether RDMA may lock memory."""
    soft = box.system.rlimits.get("memlock", -1)
    if box.system.ipc_lock or soft == -1:
        return fine("memory can be locked without limit")
    finding = f"ulimit -l: {rough_size(soft)} can be locked"
    if box.network.infiniband:
        return bad(
            finding,
            "InfiniBand registers memory by locking it: NCCL can't start on it",
            container="docker run --ulimit memlock=-1:-1 …",
            kubernetes="securityContext: {capabilities: {add: [IPC_LOCK]}}   (a pod has no ulimits)",
            slurm="LimitMEMLOCK=infinity for slurmd, PropagateResourceLimitsExcept=MEMLOCK in slurm.conf",
            host="'* - memlock unlimited' in /etc/security/limits.d/rdma.conf, then log in again",
        )
    return fine(f"{finding}; only RDMA needs more, and there is none here")


def shared(box: MachineFacts) -> CheckResult:
    """Compares /dev/shm with what the recipe, NCCL and other libraries put there."""
    total, free, needs = box.system.shm, box.limits.shm_bytes, box.needs
    several = len(box.gpus.cards) > 1
    gib = max(1, math.ceil(needs.ahead / GIB))
    remedies = {
        "container": f"docker run --shm-size={gib}g …   (or --ipc=host)",
        "kubernetes": pod_volume("shm", f"emptyDir: {{medium: Memory, sizeLimit: {gib}Gi}}", "/dev/shm"),
        "slurm": "srun --container-mounts=/dev/shm:/dev/shm …   (Pyxis; Apptainer: --bind /dev/shm)",
        "host": f"sudo mount -o remount,size={gib}G /dev/shm",
    }
    own = "the trainer's own loader does without it"
    if total is None:
        judge = bad if several else warning
        why = f"NCCL and plain DataLoaders with workers need it ({own})"
        return judge("/dev/shm isn't there, or can't be written", why, **remedies)
    if total >= gib * GIB:
        remedies = {"host": "ls -l /dev/shm; rm what processes left there that are gone"}
    finding = f"{rough_size(free)} of {rough_size(total)} in /dev/shm are free"
    if several and free < _SHM_OF_NCCL:
        judge = bad if free < _SHM_LEAST * len(box.gpus.cards) else warning
        return judge(finding, f"NCCL wants about 1 GiB for {len(box.gpus.cards)} GPUs", **remedies)
    if needs.ahead > free:
        return warning(
            finding,
            f"a plain DataLoader with the data.workers of {needs.recipe} would put {rough_size(needs.ahead)} "
            f"there and end with a bus error; {own}",
            **remedies,
        )
    return fine(f"{finding}; {own}")


def pids(box: MachineFacts) -> CheckResult:
    """Compares the limit of processes and threads with the run's."""
    most, needs, wanted = box.limits.pids, box.needs, _tasks(box)
    if most is None:
        return fine("processes aren't limited by a cgroup")
    if most < wanted:
        judge = bad if most < wanted / 2 else warning
        return judge(
            f"{most} processes and threads at most ({box.limits.sources.get('pids', 'pids.max')})",
            f"{_ranks(needs.ranks)} with {needs.workers} workers each take up to about {wanted}: the next "
            "fails",
            container="docker run --pids-limit=4096 …",
            kubernetes="kubelet: podPidsLimit: 4096   (of the node, not of the pod)",
            slurm="TasksMax=infinity for slurmd (systemctl edit slurmd; an administrator's)",
            host="--set data.workers=1, or TasksMax= of the systemd unit that started this",
        )
    return fine(f"{most} processes and threads may run")


def _ulimit(box: MachineFacts, name: str, letter: str, least: int, cause: str, what: str) -> CheckResult:
    soft = box.system.rlimits.get(name)
    if soft is None:
        return unavailable(f"there is no limit of {what} here")
    finding = f"{what}: {'unlimited' if soft == -1 else soft}"
    if soft != -1 and soft < least:
        return warning(
            finding,
            cause,
            container=f"docker run --ulimit {name}=65536:65536 …",
            kubernetes=f'command: ["bash", "-c", "ulimit -{letter} 65536 && exec trainer train …"]   '
            "(up to the hard limit)",
            host=f"ulimit -{letter} 65536   (in a batch script before srun)",
        )
    return fine(finding)


def nofile(box: MachineFacts) -> CheckResult:
    """Limit of open files."""
    cause = "each rank holds sockets, shards and two pipes for each loader worker; then 'Too many open files'"
    return _ulimit(box, "nofile", "n", 1024, cause, "open files")


def nproc(box: MachineFacts) -> CheckResult:
    """Limit of the user's processes."""
    cause = "threads count, and so do all of this user's processes: 'Resource temporarily unavailable'"
    return _ulimit(box, "nproc", "u", max(1024, _tasks(box)), cause, "processes of this user")


def user_name(box: MachineFacts) -> CheckResult:
    """Checks whether the user has a name."""
    uid, given = box.system.uid, box.environ.get("LOGNAME") or box.environ.get("USER")
    if box.system.user:
        return fine(f"uid {uid} is {box.system.user}")
    if given:
        return fine(f"uid {uid} has no name, but LOGNAME or USER gives one ({given})")
    finding = f"uid {uid} has no name, and neither USER nor LOGNAME is set"
    if numbers(box.software.torch) >= [2, 13]:
        return fine(f"{finding}; this torch does without")
    judge = bad if box.needs.compiles else warning
    return judge(
        finding, "torch.compile asks for one, and ends with a KeyError", **variable("USER", "trainer")
    )


def user_home(box: MachineFacts) -> CheckResult:
    """Checks whether the home folder can be written."""
    if not box.system.home_error:
        return fine(f"HOME={box.environ.get('HOME')} can be written")
    why = "libraries keep caches and settings there, and some fail without"
    return warning(box.system.home_error, why, **variable("HOME", "/tmp"))


RESOURCE_CHECKS = (
    ("cpu.quota", quota),
    ("memory.limit", memory_limit),
    ("memory.overcommit", overcommit),
    ("memory.lock", memlock),
    ("shm.size", shared),
    ("pids.limit", pids),
    ("ulimit.nofile", nofile),
    ("ulimit.nproc", nproc),
    ("user.name", user_name),
    ("user.home", user_home),
)
