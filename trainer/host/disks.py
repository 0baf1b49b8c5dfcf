"""Looks at file systems: their kind, their free space, and how fast data is read from them."""

from __future__ import annotations

import os
import random
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer.host.kernel import mounts
from trainer.host.reading import kind_of, within_seconds

_READ = 64 << 10
_READING, _WALKING = 0.2, 0.1  # seconds
_LONGEST = 0.6  # for all that is asked of one folder; a dead NFS server answers never
# Variables that say where caches lie.
_CACHES = (
    "XDG_CACHE_HOME",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TORCH_HOME",
    "MPLCONFIGDIR",
    "CUDA_CACHE_PATH",
)


@dataclass(frozen=True)
class Mount:
    """The file system below a path.

    Attributes:
        kind: ext4, nfs4, overlay, …; "" if unknown.
        point: Where it is mounted.
        how: "bind mount", "volume", "container layer" or "mount".
    """

    kind: str = ""
    point: str = "/"
    how: str = "mount"


@dataclass(frozen=True)
class Folder:
    """A folder that runs write to.

    Attributes:
        path: Where.
        error: Why it can't be written; "".
        free: Bytes that are free for this user.
        files: Inodes that are free; -1 where there is no such number.
        mount: Its file system.
    """

    path: Path
    error: str = ""
    free: int = 0
    files: int = -1
    mount: Mount = Mount()


@dataclass(frozen=True)
class Data:
    """Location of the recipe's data.

    Attributes:
        path: As the recipe says; None: no recipe was given, or it reads no files.
        error: Why it can't be read; "".
        mount: Its file system.
        reads: Random reads of up to 64 KiB per second, one after another; 0 if none were made.
        speed: Bytes per second of them.
    """

    path: str | None = None
    error: str = ""
    mount: Mount = Mount()
    reads: float = 0.0
    speed: float = 0.0


def read_mount(path: Path, root: Path = Path("/")) -> Mount:
    """The file system that a path lies on."""
    best, found = "", Mount()
    real = os.path.realpath(path)
    for _, inner, point, kind, _ in mounts(root):
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best = point
            found = Mount(kind, point, _how(inner, kind, point))
    return found


def _how(inner: str, kind: str, point: str) -> str:
    if kind == "overlay" and point == "/":
        return "container layer"
    if re.search(r"/volumes/[^/]+/_data$|kubernetes\.io~", inner):
        return "volume"
    return "bind mount" if inner != "/" and not inner.startswith("/@") and point != "/" else "mount"


def read_folder(path: Path, root: Path = Path("/")) -> Folder:
    """Looks at a folder, or at the nearest above it that is there; writes a byte and leaves nothing.

    Args:
        path: The folder.
        root: Folder that stands for "/".
    """
    mount = within_seconds(_LONGEST, lambda: read_mount(path, root), Mount())
    late = Folder(path, error=f"no answer within {_LONGEST:g} s", mount=mount)
    return within_seconds(_LONGEST, lambda: _folder(path, mount), late)


def _nearest(path: Path) -> Path:
    folder = path.absolute()
    while not kind_of(folder) and folder != folder.parent:
        folder = folder.parent
    return folder


def _folder(path: Path, mount: Mount) -> Folder:
    try:
        folder = _nearest(path)
        if kind_of(folder) != "folder":
            return Folder(path, error=f"{folder} is no folder", mount=mount)
        room = os.statvfs(folder)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        return Folder(path, error=error.strerror or str(error), mount=mount)
    files = room.f_favail if room.f_files else -1
    return Folder(path, "", room.f_bavail * room.f_frsize, files, mount)


def read_data(path: str | None, root: Path = Path("/")) -> Data:
    """Reads at random in the files below a path, for a fifth of a second."""
    if path is None or "://" in path or path.startswith("hub:"):
        return Data(path)
    mount = within_seconds(_LONGEST, lambda: read_mount(Path(path), root), Mount())
    late = Data(path, error="no answer within a second", mount=mount)
    return within_seconds(1.0, lambda: _data(path, mount), late)


def _data(path: str, mount: Mount) -> Data:
    try:
        files = list(_files(Path(path)))
    except OSError as error:
        return Data(path, error.strerror or str(error), mount)
    draw, done, count, began = random.Random(0), 0, 0, time.monotonic()
    for name in draw.sample(files, len(files)):
        if time.monotonic() - began > _READING:
            break
        try:
            file = os.open(name, os.O_RDONLY)
            try:
                length = os.fstat(file).st_size
                offset = draw.randrange(max(1, length - _READ))
                if hasattr(os, "posix_fadvise"):  # or memory would answer
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                done += len(os.pread(file, _READ, offset))
                count += 1
            finally:
                os.close(file)
        except OSError as error:
            return Data(path, f"{name}: {error.strerror}", mount)
    seconds = max(time.monotonic() - began, 1e-6)
    return Data(path, "" if files else "it holds no files", mount, count / seconds, done / seconds)


def _files(path: Path) -> Iterator[str]:
    """Returns files below a path: those found in a tenth of a second, each up to eight times."""
    if kind_of(path) == "file":
        yield from [str(path)] * 512
        return
    folders, found, began = [str(path)], list[str](), time.monotonic()
    while folders and time.monotonic() - began < _WALKING:
        with os.scandir(folders.pop(0)) as entries:
            for entry in entries:
                if entry.is_dir():
                    folders.append(entry.path)
                elif entry.is_file():
                    found.append(entry.path)
                if len(found) >= 4096 or time.monotonic() - began > _WALKING:
                    break
    yield from found * max(1, min(8, 512 // max(1, len(found))))


def cache_folders(environ: Mapping[str, str]) -> dict[str, Path]:
    """Returns the folders of caches by environment variable; ~/.cache for those that aren't set."""
    found = {name: Path(environ[name]) for name in _CACHES if environ.get(name)}
    if "XDG_CACHE_HOME" not in found:
        found["XDG_CACHE_HOME"] = Path(environ.get("HOME") or "/", ".cache")
    return found
