"""Folders that runs write to, caches, and where the data lies."""

from __future__ import annotations

from trainer.commands.doctor.facts import GIB, Box, Finding, bad, fine, unavailable, warn
from trainer.commands.doctor.helpers import pod_volume, size, some

_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "afs", "9p"}
_SLOW_WRITE, _FEW_READS, _LEAST, _LITTLE = 20e6, 300, GIB, 10 * GIB
_CACHE_VOLUME = {
    "docker": "docker run -v trainer-cache:/cache …",
    "compose": "volumes: ['cache:/cache']",
    "kubernetes": pod_volume("cache", "emptyDir: {}", "/cache"),
}


def _room(box: Box, role: str, what: str, remedy: dict[str, str]) -> Finding:  # noqa: PLR0911
    folder = box.folders[role]
    where = f"{what} {folder.path}"
    if folder.error:
        judge = warn if role == "cache" else bad
        return judge(f"{where}: {folder.error}", "nothing can be written there", **remedy)
    said = f"{where}: {size(folder.free)} free on {folder.mount.kind or 'an unknown file system'}"
    if folder.speed is not None:
        said += f", {folder.speed / 1e6:,.0f} MB/s" if folder.speed else ", a few MiB took too long to write"
    if folder.free < _LEAST or 0 <= folder.files < 1000:
        why = f"only {folder.files} more files fit" if 0 <= folder.files < 1000 else "checkpoints won't fit"
        return bad(said, why if role != "cache" else "compiled code and copies of data won't fit", **remedy)
    if folder.free < _LITTLE:
        return warn(said, "a few checkpoints of a large model take that", **remedy)
    if folder.mount.kind in ("tmpfs", "ramfs") and role != "tmp":
        return warn(said, "it lies in memory: it counts against the limit, and is gone at the end", **remedy)
    if role == "run" and folder.mount.how == "container layer":
        return warn(said, "it lies in the container's own layer: slow, and gone with it", **remedy)
    if folder.speed is not None and folder.speed < _SLOW_WRITE:
        return warn(said, "checkpoints and logs wait for it: a slow disk, or one that is busy now", **remedy)
    return fine(said)


def run_folder(box: Box) -> Finding:
    """Where the run is written."""
    return _room(
        box,
        "run",
        "run folder",
        {
            "docker": 'docker run -u "$(id -u):$(id -g)" -v /data/runs:/workspace/runs …',
            "compose": "volumes: ['/data/runs:/workspace/runs']",
            "kubernetes": pod_volume("runs", "persistentVolumeClaim: {claimName: runs}", "/workspace/runs")
            + "   (and securityContext: {fsGroup: 1000})",
            "slurm": "trainer train … --out /scratch/$USER/runs/$SLURM_JOB_ID",
            "host": "trainer train … --out /another/disk/runs/mine",
        },
    )


def cache_folder(box: Box) -> Finding:
    """Where caches are written."""
    return _room(
        box,
        "cache",
        "cache folder",
        {
            **_CACHE_VOLUME,
            "slurm": "export XDG_CACHE_HOME=/scratch/$USER/cache",
            "host": "export XDG_CACHE_HOME=/another/disk/cache",
        },
    )


def tmp_folder(box: Box) -> Finding:
    """Where temporary files are written."""
    return _room(
        box,
        "tmp",
        "temporary folder",
        {
            "docker": "docker run --tmpfs /tmp:size=2g …   (with --read-only there is none otherwise)",
            "compose": "tmpfs: ['/tmp:size=2g']",
            "kubernetes": pod_volume("tmp", "emptyDir: {}", "/tmp"),
            "slurm": "#SBATCH --tmp=10G   (a node with that much), and export TMPDIR=/local/scratch",
            "host": "export TMPDIR=/another/disk/tmp",
        },
    )


def caches(box: Box) -> Finding:
    """Whether every cache can be written, and is not another user's."""
    known = box.folders["cache"].path  # disk.cache tells of that one
    broken = [
        f"{name}={folder.path}: {folder.error}"
        for name, folder in box.caches.items()
        if folder.error and folder.path != known
    ]
    if broken:
        name = broken[0].partition("=")[0]
        return warn(
            some(broken, 2),
            "code is compiled anew in every run, or can't be",
            **_CACHE_VOLUME,
            slurm=f"export {name}=/scratch/$USER/cache",
            host=f"export {name}=/tmp/cache-$(id -u)",
        )
    remote = [folder for folder in box.caches.values() if folder.mount.kind in _NETWORK]
    if remote:
        return warn(
            f"{remote[0].path} lies on {remote[0].mount.kind}",
            "every compilation makes thousands of small files and locks there",
            host="export XDG_CACHE_HOME=/local/disk/cache",
            slurm="export XDG_CACHE_HOME=/local/scratch/$USER/cache   (a disk of the node)",
            docker="docker run -v trainer-cache:/cache …   (a volume of this host)",
        )
    return fine(f"{len(box.caches)} cache folders can be written")


def data_path(box: Box) -> Finding:  # noqa: PLR0911
    """What the data lies on."""
    data = box.data
    if data.path is None:
        named = box.plan.recipe
        why = f"{named} reads no files" if named else "no recipe was named: trainer doctor RECIPE"
        return unavailable(why)
    if "://" in data.path:
        return fine("the data comes through data.cache, which is looked at as a folder")
    if data.error:
        return bad(
            f"{data.path}: {data.error}",
            "there is nothing to train on",
            docker=f"docker run -v {data.path}:{data.path}:ro …",
            compose=f"volumes: ['{data.path}:{data.path}:ro']",
            kubernetes=pod_volume(
                "data", "persistentVolumeClaim: {claimName: data, readOnly: true}", data.path
            ),
            slurm=f"srun --container-mounts={data.path}:{data.path}:ro …",
            host="--set data.path=…",
        )
    kind, how = data.mount.kind or "an unknown file system", data.mount.how
    said = f"{data.path} lies on {kind} ({how} at {data.mount.point})"
    pack = {
        "host": f"trainer data pack {data.path} /local/disk/pack   (large files instead of many small ones)",
        "docker": "docker run -v /local/disk/pack:/data:ro …",
        "compose": "volumes: ['/local/disk/pack:/data:ro']",
        "kubernetes": "copy it to a volume of the node first (an initContainer and an emptyDir)",
        "slurm": f"srun --ntasks-per-node=1 cp -r {data.path} /local/scratch/   (to a disk of each node)",
    }
    if kind in _NETWORK or kind.startswith("fuse"):
        return warn(said, "every image is a round trip over the network", **pack)
    if how == "container layer":
        return warn(said, "it was copied into the container: slow, and once for each", **pack)
    if kind in ("tmpfs", "ramfs"):
        return warn(said, "it lies in memory and counts against the limit", **pack)
    if data.mount.rotational and data.reads < 10 * _FEW_READS:
        turns = (
            f"{data.reads:,.0f} random reads per second, and the kernel's flag (queue/rotational) says that "
            "the disk turns, as it does of many virtual disks"
        )
        return warn(said, turns, **pack)
    return fine(said)


def data_speed(box: Box) -> Finding:
    """How fast it is read at random."""
    data = box.data
    if not data.reads:
        return unavailable("nothing was read: no recipe with files on this machine was named")
    said = f"{data.reads:,.0f} random reads per second, {data.speed / 1e6:,.0f} MB/s, one after another"
    if data.reads < _FEW_READS:
        return warn(
            said,
            f"a worker that reads one image at a time gets no more than {data.reads:,.0f} per second",
            host=f"trainer data pack {data.path} /local/disk/pack; or more workers: --set data.workers=…",
            slurm=f"srun --ntasks-per-node=1 cp -r {data.path} /local/scratch/   (to a disk of each node)",
            kubernetes="copy it to a volume of the node first (an initContainer and an emptyDir)",
        )
    return fine(said)


CHECKS = (
    ("disk.run", run_folder),
    ("disk.cache", cache_folder),
    ("disk.tmp", tmp_folder),
    ("cache.writable", caches),
    ("data.path", data_path),
    ("data.speed", data_speed),
)
