"""CPUs, memory, shared memory and ulimits: what the container is given against what a run wants."""

from __future__ import annotations

import math

from trainer.commands.doctor.facts import GIB, MIB, Box, Finding, bad, fine, unavailable, warn
from trainer.commands.doctor.helpers import pod_volume, ranks, size

# NCCL's own advice for containers is 1 GiB of /dev/shm.
_SHM_OF_NCCL = GIB
# Below that a job on several GPUs was seen to fail: NCCL takes tens of MiB for each.
_SHM_LEAST = 32 * MIB
_TASKS_PER_RANK, _TASKS_PER_WORKER = 64, 4  # as in trainer.host.limits


def quota(box: Box) -> Finding:
    """The CPU quota against the planned ranks and workers, and whether it bites."""
    cpus, plan, limits = box.limits.cpus, box.plan, box.limits
    wanted = max(plan.ranks * (plan.workers + 1), 1)
    remedy = {"host": f"--set data.workers={max(0, math.floor(cpus / plan.ranks) - 1)}"}
    most = min(wanted, box.system.machine_cpus)
    if most > cpus:
        remedy |= {
            "docker": f"docker run --cpus={most} …",
            "compose": f"cpus: {most}",
            "kubernetes": f'resources: {{requests: {{cpu: "{most}"}}, limits: {{cpu: "{most}"}}}}',
            "slurm": f"#SBATCH --cpus-per-task={max(1, most // plan.ranks)}",
        }
    said = f"{cpus:g} CPUs ({limits.sources.get('cpus', 'unknown')})"
    if cpus < plan.ranks:
        return warn(
            f"{said} for {ranks(plan.ranks)}",
            "a rank has less than one CPU: steps are slow and uneven",
            **remedy,
        )
    if cpus < wanted:
        return warn(
            f"{said} for {ranks(plan.ranks)} with {plan.workers} loader workers each",
            "workers take the time of the ranks that they should feed",
            **remedy,
        )
    if box.system.throttled is not None and box.system.throttled > 0.1:
        whole = math.ceil(cpus)
        return warn(
            f"{said}; the quota stopped this container in {box.system.throttled:.0%} of its periods so far",
            "more threads run than the quota pays for, and all of them are stopped together",
            docker=f"docker run --cpuset-cpus=0-{whole - 1} …   (instead of --cpus)",
            compose=f'cpuset: "0-{whole - 1}"   (instead of cpus:)',
            kubernetes=f'resources: {{limits: {{cpu: "{whole}"}}}}   (whole ones: static CPU manager)',
            slurm=f"#SBATCH --cpus-per-task={whole}",
            host="OMP_NUM_THREADS=… of programs that don't ask for the limits; trainer train does",
        )
    return fine(said)


def cpuset(box: Box) -> Finding:
    """Whether this process is bound to fewer CPUs than it was given."""
    system, allowed = box.system, len(box.system.allowed_cpus)
    if not allowed:
        return unavailable("the system doesn't tell on which CPUs this may run")
    said = f"may run on {allowed} of the machine's {system.machine_cpus} CPUs"
    if allowed <= box.plan.ranks and allowed < system.machine_cpus:
        return warn(
            said,
            "the launcher or a cpuset bound it: every rank, worker and thread shares them",
            docker=f"docker run --cpuset-cpus=0-{min(system.machine_cpus, 8) - 1} …",
            compose=f'cpuset: "0-{min(system.machine_cpus, 8) - 1}"',
            kubernetes='resources: {limits: {cpu: "8"}}   (the static CPU manager gives whole CPUs)',
            slurm="#SBATCH --cpus-per-task=8, and srun --cpus-per-task=8 (srun doesn't take it from sbatch)",
            host="start it without taskset or numactl",
        )
    return fine(said)


def numa(box: Box) -> Finding:
    """Whether the process runs beside its GPUs."""
    nodes, allowed = box.system.nodes, box.system.allowed_cpus
    if len(nodes) < 2 or not allowed:
        return unavailable("one NUMA node" if nodes else "the system doesn't tell its NUMA nodes")
    own = {node for node, cpus in nodes.items() if cpus & allowed}
    far = [card for card in box.gpus.cards if card.node >= 0 and card.node not in own]
    if far:
        return warn(
            f"GPU {far[0].index} hangs on NUMA node {far[0].node}, this may run on {sorted(own)} only",
            "every copy to the GPU crosses the link between the processors",
            docker=f"docker run --cpuset-cpus={_ranges(nodes[far[0].node])} --cpuset-mems={far[0].node} …",
            compose=f'cpuset: "{_ranges(nodes[far[0].node])}"',
            kubernetes="kubelet: topologyManagerPolicy: single-numa-node   (of the node, not of the pod)",
            slurm="srun --gpu-bind=closest --cpu-bind=cores …",
            host=f"numactl --cpunodebind={far[0].node} --membind={far[0].node} trainer train …",
        )
    return fine(f"{len(nodes)} NUMA nodes, of which this may run on {len(own)}")


def memory(box: Box) -> Finding:
    """The memory limit against what the plan prepares ahead, and whether it killed already."""
    system, limits, plan = box.system, box.limits, box.plan
    if not limits.memory_bytes:
        return unavailable("the system doesn't tell its memory")
    # A rank that has imported torch takes about 0.5 GiB, one that trains 1 to 2.
    wanted = plan.loader_bytes + plan.ranks * GIB
    source = limits.sources.get("memory_bytes", "unknown")
    said = f"{size(system.available)} of {size(limits.memory_bytes)} are free"
    if system.available < wanted:
        loaders = f" and loaders of {size(plan.loader_bytes)}" if plan.loader_bytes else ""
        judge = bad if system.available < wanted / 2 else warn
        return judge(
            f"{said} ({source})",
            f"{ranks(plan.ranks)} of about a GiB each{loaders}: the kernel kills what goes beyond",
            **_more_memory(source, wanted + limits.memory_bytes - system.available),
        )
    if system.oom_kills:
        return warn(
            f"{said}; the kernel killed {system.oom_kills} processes of this container for memory so far",
            "something in it took more than the limit",
            **_more_memory(source, 2 * limits.memory_bytes),
        )
    return fine(said)


def _more_memory(source: str, wanted: float) -> dict[str, str]:
    less = {"host": "--set data.workers=1 --set data.prefetch=1, or end what else takes memory"}
    if "cgroup" not in source:  # it is the machine's: no option gives more
        return less
    gib = math.ceil(wanted / GIB) + 1
    return {
        "docker": f"docker run --memory={gib}g …",
        "compose": f"mem_limit: {gib}g",
        "kubernetes": f"resources: {{requests: {{memory: {gib}Gi}}, limits: {{memory: {gib}Gi}}}}",
        "slurm": f"#SBATCH --mem={gib}G",
        **less,
    }


def swap(box: Box) -> Finding:
    """Whether memory was swapped out."""
    system = box.system
    if system.swapped > max(GIB, 0.25 * system.swap_total):
        gib = max(1, box.limits.memory_bytes // GIB)
        return warn(
            f"{size(system.swapped)} lie in swap space",
            "what a step needs may have to come back from a disk first",
            host="free -h; end what takes the memory, then sudo swapoff -a && sudo swapon -a",
            docker=f"docker run --memory={gib}g --memory-swap={gib}g …   (the same figure: no swap)",
            compose=f"mem_limit: {gib}g; memswap_limit: {gib}g",
            slurm="#SBATCH --exclusive, or tell the administrator",
        )
    return fine(f"{size(system.swapped)} swapped out" if system.swapped else "nothing is swapped out")


def overcommit(box: Box) -> Finding:
    """Whether the kernel refuses memory that is only reserved."""
    system = box.system
    if system.overcommit == 2 and system.commit_left < 16 * GIB:
        return warn(
            f"vm.overcommit_memory=2, and {size(max(0, system.commit_left))} may still be reserved",
            "CUDA reserves as much address space as there is memory, and each worker as much as its rank has",
            host="sudo sysctl vm.overcommit_memory=0",
            docker="of the host: sudo sysctl vm.overcommit_memory=0",
            kubernetes="of the node: sysctl vm.overcommit_memory=1 (kubelet's default)",
        )
    return fine(f"vm.overcommit_memory={system.overcommit}")


def memlock(box: Box) -> Finding:
    """How much memory can be locked, by locking it."""
    system = box.system
    if system.locked is None:
        return unavailable("mlock can't be tried here")
    if system.locked >= system.tried:
        return fine(f"{size(system.locked)} could be locked at once")
    said = f"{size(system.locked)} could be locked, {size(system.tried)} could not"
    remedy = {
        "docker": "docker run --ulimit memlock=-1:-1 …",
        "compose": "ulimits: {memlock: -1}",
        "kubernetes": "securityContext: {capabilities: {add: [IPC_LOCK]}}   (a pod spec has no ulimits; else "
        "LimitMEMLOCK=infinity for the node's containerd)",
        "slurm": "PropagateResourceLimitsExcept=MEMLOCK in slurm.conf, and LimitMEMLOCK=infinity for slurmd "
        "(an administrator's)",
        "host": "'* - memlock unlimited' in /etc/security/limits.d/rdma.conf, then log in again",
    }
    if box.network.infiniband:
        return bad(said, "InfiniBand registers memory by locking it: NCCL can't start on it", **remedy)
    if system.locked < MIB:
        return warn(said, "libraries that lock memory (RDMA, io_uring) fail", **remedy)
    return fine(f"{said}; only RDMA needs more, and there is none here")


def shared(box: Box) -> Finding:
    """/dev/shm against what the plan, NCCL and other libraries put there."""
    total, free, plan = box.system.shm, box.limits.shm_bytes, box.plan
    several = len(box.gpus.cards) > 1
    gib = max(1, math.ceil(plan.ahead / GIB))
    remedy = {
        "docker": f"docker run --shm-size={gib}g …   (or --ipc=host)",
        "compose": f"shm_size: {gib}gb",
        "kubernetes": pod_volume("shm", f"emptyDir: {{medium: Memory, sizeLimit: {gib}Gi}}", "/dev/shm"),
        "slurm": "srun --container-mounts=/dev/shm:/dev/shm …   (Pyxis; Apptainer: --bind /dev/shm)",
        "host": f"sudo mount -o remount,size={gib}G /dev/shm",
    }
    own = "the trainer's own loader does without it"
    if total is None:
        judge = bad if several else warn
        return judge(
            "/dev/shm isn't there, or can't be written",
            f"NCCL and plain DataLoaders with workers need it ({own})",
            **remedy,
        )
    if total >= gib * GIB:
        remedy = {"host": "ls -l /dev/shm; rm what processes left there that are gone"}
    said = f"{size(free)} of {size(total)} in /dev/shm are free"
    if several and free < _SHM_OF_NCCL:
        judge = bad if free < _SHM_LEAST * len(box.gpus.cards) else warn
        return judge(said, f"NCCL wants about 1 GiB for {len(box.gpus.cards)} GPUs", **remedy)
    if plan.ahead > free:
        return warn(
            said,
            f"a plain DataLoader with the workers of {plan.recipe} would put {size(plan.ahead)} there and "
            f"end with a bus error; {own}",
            **remedy,
        )
    return fine(f"{said}; {own}")


def pids(box: Box) -> Finding:
    """How many processes and threads the container may have."""
    most, plan = box.limits.pids, box.plan
    if most is None:
        return fine("processes aren't limited by a cgroup")
    wanted = plan.ranks * (_TASKS_PER_RANK + _TASKS_PER_WORKER * plan.workers)
    if most < wanted:
        judge = bad if most < wanted / 2 else warn
        return judge(
            f"{most} processes and threads at most ({box.limits.sources.get('pids', 'pids.max')})",
            f"{ranks(plan.ranks)} with {plan.workers} workers each take up to about {wanted}: the next fails",
            docker="docker run --pids-limit=4096 …",
            compose="pids_limit: 4096",
            kubernetes="kubelet: podPidsLimit: 4096   (of the node, not of the pod)",
            slurm="TasksMax=infinity for slurmd (systemctl edit slurmd; an administrator's)",
            host="--set data.workers=1, or TasksMax= of the systemd unit that started this",
        )
    return fine(f"{most} processes and threads may run")


def _ulimit(box: Box, name: str, letter: str, least: int, cause: str, give: str, what: str) -> Finding:
    soft = box.system.rlimits.get(name)
    if soft is None:
        return unavailable(f"there is no limit of {what} here")
    if soft != -1 and soft < least:
        shell = f"ulimit -{letter} {int(give) // 1024 if name == 'stack' else give}"
        return warn(
            f"{what}: {size(soft) if name == 'stack' else soft}",
            cause,
            docker=f"docker run --ulimit {name}={give}:{give} …",
            compose=f"ulimits: {{{name}: {give}}}",
            kubernetes=f'command: ["bash", "-c", "{shell} && exec trainer train …"]   (up to the hard limit)',
            slurm=f"{shell}   (in the batch script, before srun)",
            host=shell,
        )
    return fine(f"{what}: {'unlimited' if soft == -1 else size(soft) if name == 'stack' else soft}")


def nofile(box: Box) -> Finding:
    """Open files."""
    cause = "each rank holds sockets, shards and two pipes for each worker; then 'Too many open files'"
    return _ulimit(box, "nofile", "n", 1024, cause, "65536", "open files")


def nproc(box: Box) -> Finding:
    """Processes of this user."""
    least = max(1024, box.plan.ranks * (_TASKS_PER_RANK + _TASKS_PER_WORKER * box.plan.workers))
    cause = "threads count, and so do all of this user's processes: 'Resource temporarily unavailable'"
    return _ulimit(box, "nproc", "u", least, cause, "65536", "processes of this user")


def stack(box: Box) -> Finding:
    """The stack of the main thread, and so that of others."""
    cause = "compilers and deep recursion (torch.compile) end with a segmentation fault"
    return _ulimit(box, "stack", "s", 8 * MIB, cause, "67108864", "stack")


def core(box: Box) -> Finding:
    """Whether a crash would fill the run folder."""
    soft, pattern = box.system.rlimits.get("core"), box.system.core_pattern
    if soft is None:
        return unavailable("there is no limit of core dumps here")
    if soft == 0 or pattern.startswith("|"):
        return fine("a crash leaves no core file in the run folder")
    return warn(
        f"core dumps are {'unlimited' if soft == -1 else size(soft)}, to {pattern or 'core'}",
        "each rank that crashes writes all of its memory there",
        docker="docker run --ulimit core=0:0 …",
        compose="ulimits: {core: 0}",
        kubernetes='command: ["bash", "-c", "ulimit -c 0 && exec trainer train …"]',
        slurm="ulimit -c 0   (in the batch script, before srun)",
        host="ulimit -c 0",
    )


def _ranges(cpus: frozenset[int]) -> str:
    """CPUs as --cpuset-cpus writes them."""
    runs = list[list[int]]()
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(one) if one == other else f"{one}-{other}" for one, other in runs)


CHECKS = (
    ("cpu.quota", quota),
    ("cpu.set", cpuset),
    ("cpu.numa", numa),
    ("memory.limit", memory),
    ("memory.swap", swap),
    ("memory.overcommit", overcommit),
    ("memory.lock", memlock),
    ("shm.size", shared),
    ("pids.limit", pids),
    ("ulimit.nofile", nofile),
    ("ulimit.nproc", nproc),
    ("ulimit.stack", stack),
    ("ulimit.core", core),
)
