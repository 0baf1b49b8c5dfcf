"""Storage: the run folder, caches, and the data."""

from __future__ import annotations

from trainer.commands.doctor.facts import CheckResult, MachineFacts, bad, fine, some, unavailable, warning
from trainer.config.sizes import GIB
from trainer.observe.text import rough_size

_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "afs", "9p"}
_IN_MEMORY = ("tmpfs", "ramfs")
_FEW_READS, _LEAST, _LITTLE, _FEW_FILES = 300, GIB, 10 * GIB, 1000


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


STORAGE_CHECKS = (
    ("disk.run", run_folder),
    ("cache.writable", caches),
    ("data.path", data_reads),
)
