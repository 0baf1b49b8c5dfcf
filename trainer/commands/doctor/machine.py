"""Memory, processes, disks and network: what the container grants against what a run needs.

Sources: proc(5), cgroup-v{1,2}.rst.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from trainer.commands.doctor.facts import (
    CheckResult,
    MachineFacts,
    System,
    bad,
    fine,
    some,
    unavailable,
    warning,
)
from trainer.config.sizes import GIB, MIB
from trainer.host.kernel import figures_in
from trainer.host.limits import TASKS_PER_RANK, TASKS_PER_WORKER, out_of_memory_kills
from trainer.host.memory_room import read_room
from trainer.host.reading import text_of
from trainer.observe.text import rough_size

# NCCL's own advice for containers is 1 GiB of /dev/shm.
_SHM_OF_NCCL = GIB
# Below that a job on several GPUs was seen to fail: NCCL takes tens of MiB for each.
_SHM_LEAST = 32 * MIB
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "afs", "9p"}
_IN_MEMORY = ("tmpfs", "ramfs")
_FEW_READS, _LEAST, _LITTLE, _FEW_FILES = 300, GIB, 10 * GIB, 1000


def read_system(root: Path) -> System:
    """Reads the facts of the kernel.

    Args:
        root: Folder that stands for "/".
    """
    free = figures_in(text_of(root / "proc/meminfo")).get("MemAvailable", 0)
    room = read_room(root)
    left = room.limit_bytes - room.others_bytes
    return System(
        available=min(left, free or left),
        oom_kills=out_of_memory_kills(root),
        shm=_shared(root / "dev/shm"),
    )


def _shared(folder: Path) -> int | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize if os.access(folder, os.W_OK) else None


def read_interfaces(root: Path) -> tuple[str, ...]:
    """Reads the names of the network interfaces, without loopback.

    Args:
        root: Folder that stands for "/".
    """
    try:
        names = sorted(entry.name for entry in (root / "sys/class/net").iterdir())
    except OSError:
        names = []
    return tuple(name for name in names if name != "lo")


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


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


def run_folder(box: MachineFacts) -> CheckResult:
    """Checks whether the run folder can be written, and has room."""
    folder = box.run
    where = f"run folder {folder.path}"
    elsewhere = "trainer train … --out /another/disk/runs/mine"
    if folder.error:
        return bad(f"{where}: {folder.error}", "nothing can be written there", elsewhere)
    finding = f"{where}: {rough_size(folder.free)} free on {folder.mount.kind or 'an unknown file system'}"
    few = 0 <= folder.files < _FEW_FILES
    if few or folder.free < _LEAST:
        why = f"only {folder.files} more files fit" if few else "checkpoints won't fit"
        return bad(finding, why, elsewhere)
    if folder.free < _LITTLE:
        return warning(finding, "a few checkpoints of a large model take that", elsewhere)
    if folder.mount.kind in _IN_MEMORY:
        return warning(
            finding, "it lies in memory: it counts against the limit, and is gone at the end", elsewhere
        )
    if folder.mount.how == "container layer":
        return warning(
            finding,
            "it lies in the container's own layer: slow, and gone with it",
            f'docker run -v "$PWD/runs:{folder.path.absolute()}" …   (a pod: a persistentVolumeClaim there)',
        )
    return fine(finding)


def caches(box: MachineFacts) -> CheckResult:
    """Checks whether every cache can be written, has room, and is on a local disk."""
    broken = {name: f"{name}={one.path}: {one.error}" for name, one in box.caches.items() if one.error}
    small = {
        name: f"{name}={one.path}: {rough_size(one.free)} free"
        for name, one in box.caches.items()
        if not one.error and (one.free < _LEAST or 0 <= one.files < _FEW_FILES)
    }
    remote = {
        name: f"{name}={one.path} lies on {one.mount.kind}"
        for name, one in box.caches.items()
        if one.mount.kind in _NETWORK
    }
    for found, cause in (
        (broken, "code is compiled again in every run, or can't be compiled"),
        (small, "compiled code and copies of data won't fit"),
        (remote, "every compilation makes thousands of small files and locks there"),
    ):
        if found:
            # Each by its own variable: an image sets more than XDG_CACHE_HOME.
            moved = " ".join(f"{name}=/tmp/cache-$(id -u)" for name in found if name.isupper())
            remedy = f"export {moved}" if moved else "--set data.cache=/another/disk/cache"
            return warning(some(found.values(), 2), cause, remedy)
    return fine(f"{len(box.caches)} cache folders can be written")


def data_reads(box: MachineFacts) -> CheckResult:  # noqa: PLR0911
    """File system of the data, and its speed of random reads."""
    data = box.data
    if data.path is None:
        named = box.needs.recipe
        return unavailable(
            f"{named} reads no files" if named else "no recipe was named: trainer doctor RECIPE"
        )
    if data.path.startswith("hub:"):
        return fine("the data comes from the hub, into the client's cache (HF_HOME)")
    if "://" in data.path:
        return fine("the data comes through data.cache, which is looked at as a folder")
    if data.error:
        mount = f"docker run -v {data.path}:{data.path}:ro …"
        return bad(
            f"{data.path}: {data.error}",
            "there is nothing to train on",
            f"--set data.path=…   (in a container, what isn't mounted isn't there: {mount})",
        )
    kind, how = data.mount.kind or "an unknown file system", data.mount.how
    finding = f"{data.path} lies on {kind} ({how} at {data.mount.point})"
    if data.reads:
        finding += f": {data.reads:,.0f} random reads per second, {data.speed / 1e6:,.0f} MB/s"
    pack = f"trainer data pack {data.path} /local/disk/pack   (large files on a disk of the node)"
    if kind in _NETWORK or kind.startswith("fuse"):
        return warning(finding, "every image is a round trip over the network", pack)
    if how == "container layer":
        mount = f"docker run -v /local/disk/data:{data.path}:ro …"
        return warning(finding, "it was copied into the container: slow, and once for each", mount)
    if kind in _IN_MEMORY:
        return warning(finding, "it lies in memory and counts against the limit", pack)
    if 0 < data.reads < _FEW_READS:
        why = f"a loader worker that reads one image at a time gets no more than {data.reads:,.0f} per second"
        return warning(finding, why, pack)
    return fine(finding)


def nccl(box: MachineFacts) -> CheckResult:
    """Checks whether the settings of NCCL and Gloo are right."""
    environ = box.environ
    known = (*box.interfaces, "lo")
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        words = [word for word in environ.get(name, "").split(",") if word]
        if words and not words[0].startswith("^") and not any(_names(word, known) for word in words):
            judge = warning if name.startswith("NCCL") and not box.gpus.cards else bad
            return judge(
                f"{name}={environ[name]}: there is {some(known)}",
                "ranks can't connect: no interface has that name",
                f"unset {name}   (or name an interface that every node has)",
            )
    off = [name for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE") if environ.get(name) == "1"]
    if off and box.gpus.cards:
        why = "NCCL takes a slower way; such a line often stays from a search for a fault"
        return warning(f"{', '.join(off)}=1", why, f"unset {' '.join(off)}")
    if not box.gpus.cards:
        return unavailable("no GPU: ranks talk through Gloo")
    return fine("no setting slows NCCL")


def _names(word: str, known: tuple[str, ...]) -> bool:
    """Returns True if a word of NCCL_SOCKET_IFNAME matches an interface: by prefix, or with = exactly."""
    name = word.removeprefix("=")
    return any(one == name if word.startswith("=") else one.startswith(name) for one in known)


MACHINE_CHECKS = (
    ("memory.limit", memory),
    ("shm.size", shared),
    ("pids.limit", pids),
    ("disk.run", run_folder),
    ("cache.writable", caches),
    ("data.path", data_reads),
    ("net.nccl", nccl),
)
