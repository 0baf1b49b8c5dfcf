"""Storage: folders that runs write to, caches, and the data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from trainer.commands.doctor.facts import (
    CheckResult,
    MachineFacts,
    bad,
    fine,
    pod_volume,
    some,
    unavailable,
    warning,
)
from trainer.config.sizes import GIB
from trainer.observe.text import rough_size

_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "afs", "9p"}
_IN_MEMORY = ("tmpfs", "ramfs")
_FEW_READS, _LEAST, _LITTLE = 300, GIB, 10 * GIB
# What each folder is called, and how it is given another place.
_FOLDERS = {
    "run": (
        "run folder",
        {
            "container": 'docker run -u "$(id -u):$(id -g)" -v /data/runs:/workspace/runs …',
            "kubernetes": pod_volume("runs", "persistentVolumeClaim: {claimName: runs}", "/workspace/runs")
            + "   (and securityContext: {fsGroup: 1000})",
            "slurm": "trainer train … --out /scratch/$USER/runs/$SLURM_JOB_ID",
            "host": "trainer train … --out /another/disk/runs/mine",
        },
    ),
    "cache": (
        "cache folder",
        {
            "container": "docker run -v trainer-cache:/cache …",
            "kubernetes": pod_volume("cache", "emptyDir: {}", "/cache"),
            "slurm": "export XDG_CACHE_HOME=/local/scratch/$USER/cache   (a disk of the node)",
            "host": "export XDG_CACHE_HOME=/another/disk/cache",
        },
    ),
    "tmp": (
        "temporary folder",
        {
            "container": "docker run --tmpfs /tmp:size=2g …   (with --read-only there is none otherwise)",
            "kubernetes": pod_volume("tmp", "emptyDir: {}", "/tmp"),
            "slurm": "#SBATCH --tmp=10G   (a node with that much), and export TMPDIR=/local/scratch",
            "host": "export TMPDIR=/another/disk/tmp",
        },
    ),
}


def _room(role: str, box: MachineFacts) -> CheckResult:
    """Checks whether a folder can be written and has room."""
    folder, (what, remedies) = box.folders[role], _FOLDERS[role]
    where = f"{what} {folder.path}"
    if folder.error:
        judge = warning if role == "cache" else bad
        return judge(f"{where}: {folder.error}", "nothing can be written there", **remedies)
    finding = f"{where}: {rough_size(folder.free)} free on {folder.mount.kind or 'an unknown file system'}"
    few = 0 <= folder.files < 1000
    if folder.free < _LEAST or few:
        small = "checkpoints won't fit" if role != "cache" else "compiled code and copies of data won't fit"
        return bad(finding, f"only {folder.files} more files fit" if few else small, **remedies)
    if folder.free < _LITTLE:
        return warning(finding, "a few checkpoints of a large model take that", **remedies)
    if folder.mount.kind in _IN_MEMORY and role != "tmp":
        return warning(
            finding, "it lies in memory: it counts against the limit, and is gone at the end", **remedies
        )
    if folder.mount.how == "container layer" and role == "run":
        return warning(finding, "it lies in the container's own layer: slow, and gone with it", **remedies)
    return fine(finding)


def caches(box: MachineFacts) -> CheckResult:
    """Checks whether every cache can be written, and is on a local disk."""
    known = box.folders["cache"].path  # disk.cache tells of that one
    broken = [
        f"{name}={folder.path}: {folder.error}"
        for name, folder in box.caches.items()
        if folder.error and folder.path != known
    ]
    remedies = _FOLDERS["cache"][1]
    if broken:
        name = broken[0].partition("=")[0]
        remedies = {**remedies, "slurm": "", "host": f"export {name}=/tmp/cache-$(id -u)"}
        return warning(
            some(broken, 2), "code is compiled again in every run, or can't be compiled", **remedies
        )
    remote = [folder for folder in box.caches.values() if folder.mount.kind in _NETWORK]
    if remote:
        why = "every compilation makes thousands of small files and locks there"
        return warning(f"{remote[0].path} lies on {remote[0].mount.kind}", why, **remedies)
    return fine(f"{len(box.caches)} cache folders can be written")


def _data_path(box: MachineFacts) -> CheckResult:  # noqa: PLR0911
    """File system of the data, and its speed of random reads."""
    data = box.data
    if data.path is None:
        named = box.needs.recipe
        why = f"{named} reads no files" if named else "no recipe was named: trainer doctor RECIPE"
        return unavailable(why)
    if "://" in data.path:
        return fine("the data comes through data.cache, which is looked at as a folder")
    if data.error:
        claim = "persistentVolumeClaim: {claimName: data, readOnly: true}"
        return bad(
            f"{data.path}: {data.error}",
            "there is nothing to train on",
            container=f"docker run -v {data.path}:{data.path}:ro …",
            kubernetes=pod_volume("data", claim, data.path),
            slurm=f"srun --container-mounts={data.path}:{data.path}:ro …",
            host="--set data.path=…",
        )
    kind, how = data.mount.kind or "an unknown file system", data.mount.how
    finding = f"{data.path} lies on {kind} ({how} at {data.mount.point})"
    if data.reads:
        finding += f": {data.reads:,.0f} random reads per second, {data.speed / 1e6:,.0f} MB/s"
    copy = f"srun --ntasks-per-node=1 cp -r {data.path} /local/scratch/   (to a disk of each node)"
    remedies = {
        "container": "docker run -v /local/disk/pack:/data:ro …   (made by trainer data pack)",
        "kubernetes": "copy it to a volume of the node first (an initContainer and an emptyDir)",
        "slurm": copy,
        "host": f"trainer data pack {data.path} /local/disk/pack   (large files, not many small ones)",
    }
    if kind in _NETWORK or kind.startswith("fuse"):
        return warning(finding, "every image is a round trip over the network", **remedies)
    if how == "container layer":
        return warning(finding, "it was copied into the container: slow, and once for each", **remedies)
    if kind in _IN_MEMORY:
        return warning(finding, "it lies in memory and counts against the limit", **remedies)
    if 0 < data.reads < _FEW_READS:
        why = f"a loader worker that reads one image at a time gets no more than {data.reads:,.0f} per second"
        return warning(finding, why, **remedies)
    return fine(finding)


STORAGE_CHECKS: tuple[tuple[str, Callable[[MachineFacts], CheckResult]], ...] = (
    *((f"disk.{role}", partial(_room, role)) for role in _FOLDERS),
    ("cache.writable", caches),
    ("data.path", _data_path),
)
