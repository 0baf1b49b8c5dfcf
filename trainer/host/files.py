"""File operations that outlast a kill, all through the name `os` here: tests put faults there.

What is written follows no link: a folder from elsewhere may hold any, in the names that are written next.
New content goes to a new name that can't be foreseen and is moved (`written_whole`); what is added to a file
goes to a regular one that has no other name (`open_own`); a folder in the folder is none by a link
(`own_folder`).
"""

# ruff: noqa: PTH102, PTH104, PTH106, PTH108, PTH208
import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

Buffer = bytes | memoryview

# Large enough that the thread seldom asks for the GIL, small enough to be in the cache when it is written.
_CHUNK = 1 << 20
_LINE = 64 << 20  # a row of checksums has a hash of each tensor
_BESIDE = re.compile(r"\.tmp-[0-9a-f]{16}-(.+)")


def write_file(path: Path, parts: Iterable[Buffer]) -> str:
    """Writes a new file to the disk, not only to the kernel.

    Returns:
        SHA-256 of what was written, hexadecimal.

    Raises:
        OSError: If it exists or can't be written.
    """
    digest = hashlib.sha256()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for part in parts:
            for start in range(0, len(part), _CHUNK):
                chunk = memoryview(part)[start : start + _CHUNK]
                digest.update(chunk)
                while chunk:
                    chunk = chunk[os.write(file, chunk) :]
        os.fsync(file)
    finally:
        os.close(file)
    return digest.hexdigest()


def write_whole(path: Path, text: str) -> None:
    """Writes a file that a reader sees whole or not at all; a machine that stops may lose it."""
    with written_whole(path, lasting=False) as beside:
        beside.write_text(text, encoding="utf-8", errors="replace")


def make_folder(path: Path) -> None:
    """Makes a folder that lasts, if there is none; its parent must exist."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    sync_folder(path.parent)  # also of one that a killed process made


def sync_folder(path: Path) -> None:
    """Makes the names in a folder last: files that were made in it, moved or removed."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    except OSError as error:
        # Some network file systems can't, and keep names in order without being asked.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(folder)


def rename(path: Path, to: Path) -> None:
    """Moves a file or folder within a file system, at once."""
    os.rename(path, to)


def remove(path: Path) -> None:
    """Removes a file or folder with what is in it, if there is one; follows no symbolic link."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
            return
        for name in os.listdir(path):
            remove(path / name)
        os.rmdir(path)


@contextlib.contextmanager
def opened_folder(path: Path) -> Iterator[int]:
    """Opens a folder for `opened_file`: what is opened there stays the same folder when it is renamed."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield folder
    finally:
        os.close(folder)


@contextlib.contextmanager
def opened_file(folder: int, name: str) -> Iterator[tuple[int, int]]:
    """Opens a regular file for reading.

    Args:
        folder: From `opened_folder`.
        name: Of a file right in it.

    Yields:
        The file and its size in bytes.

    Raises:
        OSError: As `open_own`.
    """
    file = open_own(name, os.O_RDONLY, alone=False, folder=folder)
    try:
        yield file, os.fstat(file).st_size
    finally:
        os.close(file)


def read_at(file: int, start: int, size: int) -> bytes:
    """Reads a small piece of a file; fewer bytes where the file ends."""
    pieces = []
    while size > 0 and (piece := os.pread(file, size, start)):
        pieces.append(piece)
        start, size = start + len(piece), size - len(piece)
    return b"".join(pieces)


def read_into(file: int, start: int, into: memoryview) -> None:
    """Reads a piece of a file, from byte `start` on.

    Args:
        file: From `opened_file`.
        start: Where it begins.
        into: Where it goes; as long as the piece.

    Raises:
        ValueError: If the file ends before.
    """
    done = 0
    while done < len(into):
        if not (got := os.preadv(file, [into[done:]], start + done)):
            raise ValueError("ends before its tensors do")
        done += got


def read_hashed(file: int, size: int, into: memoryview | None, advance: Callable[[int], object]) -> str:
    """Reads a file from its beginning, each byte once.

    Args:
        file: From `opened_file`.
        size: Bytes to read.
        into: Where they go, `size` bytes; None drops them.
        advance: Called with the number of bytes after each chunk.

    Returns:
        SHA-256 of these bytes, hexadecimal.

    Raises:
        ValueError: If the file ends before.
    """
    digest = hashlib.sha256()
    dropped = memoryview(bytearray(min(size, _CHUNK))) if into is None else None
    position = 0
    while position < size:
        end = min(position + _CHUNK, size)
        chunk = into[position:end] if into is not None else dropped[: end - position]  # type: ignore[index]
        count = os.readv(file, [chunk])
        if count == 0:
            raise ValueError("got shorter while it was read")
        digest.update(chunk[:count])
        advance(count)
        position += count
    return digest.hexdigest()


def names(folder: Path) -> list[str]:
    """Names of what is in a folder, sorted; none if there is no folder."""
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


def size_and_time(path: Path) -> tuple[int, float]:
    """Bytes of the files right in a folder, and when the last one was made, in seconds since 1970."""
    facts = os.lstat(path)
    if not stat.S_ISDIR(facts.st_mode):
        return facts.st_size, facts.st_mtime
    sizes = (os.lstat(path / name) for name in os.listdir(path))
    return sum(size.st_size for size in sizes if stat.S_ISREG(size.st_mode)), facts.st_mtime


@contextlib.contextmanager
def written_whole(path: Path, lasting: bool = True) -> Iterator[Path]:
    """Makes a file to write to, under a new name; moves it to `path` at the end, removes it after an error.

    Args:
        path: Replaced, also where it is a link; what that leads to isn't touched.
        lasting: Whether it is on the disk then.

    Raises:
        OSError: If it can't be written; a folder or a device is never replaced.
    """
    _check_no_device(path)
    beside = _beside(path)
    try:
        _make(beside)
        mode = stat.S_IMODE(beside.stat().st_mode)  # os.umask would change it for other threads
        yield beside
        beside.chmod(mode)  # safetensors makes files for the owner only
        if lasting:
            with beside.open("rb") as file:
                os.fsync(file.fileno())
        beside.replace(path)
        if lasting:
            sync_folder(path.parent)
    except OSError as error:
        if error.filename is None or str(error.filename) == str(beside):  # a full disk's names no file
            error.filename = str(path)
        raise
    finally:
        beside.unlink(missing_ok=True)


def _check_no_device(path: Path) -> None:
    """Refuses `/dev/null`, `/dev/stdout` and the like, which root would replace for all."""
    in_dev = Path(os.path.realpath(path.parent)).is_relative_to("/dev")
    with contextlib.suppress(FileNotFoundError):
        kind = stat.S_IFMT(os.lstat(path).st_mode)
        if kind in (stat.S_IFCHR, stat.S_IFBLK) or (in_dev and kind != stat.S_IFREG):
            raise OSError(errno.EEXIST, "it is a device", str(path))


def _beside(path: Path) -> Path:
    """Returns an unpredictable name with the same suffix, by which libraries choose a format."""
    return path.with_name(f".tmp-{secrets.token_hex(8)}-{path.name}")


def _make(path: Path) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))  # follows no link


def check_writable(folder: Path) -> None:
    """Makes a file in a folder, and removes it.

    Raises:
        OSError: If it can't.
    """
    check_replaceable(folder / secrets.token_hex(8))


def check_replaceable(path: Path) -> None:
    """Checks that `written_whole` can write a file: to be called before long work whose result goes there.

    Raises:
        OSError: If it can't, or it would replace a pipe or a socket.
    """
    _check_no_device(path)
    if path.is_fifo() or path.is_socket():
        raise OSError(errno.EEXIST, "it is a pipe or a socket", str(path))
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    probe = _beside(path)
    _make(probe)
    probe.unlink()


def is_unfinished(name: str) -> bool:
    """Returns True if a file is what `written_whole` leaves when it is killed."""
    return _BESIDE.fullmatch(name) is not None


def remove_unfinished(folder: Path, stem: str | None = None) -> None:
    """Removes what killed writes left, of all files or of one: only for the one who alone writes it."""
    for name in names(folder):
        match = _BESIDE.fullmatch(name)
        if match and stem in (None, Path(match[1]).stem):
            remove(folder / name)


_ODD = {errno.ELOOP: "is a symbolic link", errno.ENXIO: "isn't a regular file"}


def open_own(
    path: Path | str, flags: int, alone: bool = True, links: bool = False, folder: int | None = None
) -> int:
    """Opens or makes a regular file, and nothing that leads elsewhere: each file of a run folder.

    Args:
        path: The file; the folder that it lies in may be a link.
        flags: Of `os.open`.
        alone: Whether it must have no other name, as what is written to.
        links: Whether it may be a symbolic link, as the user's own files.
        folder: From `opened_folder`, for the name of a file in it.

    Raises:
        OSError: If it can't be opened, or is a link, a FIFO, a device or a folder; strerror says which.
    """
    assert not flags & os.O_TRUNC, "it may be another's"
    # O_NONBLOCK: a FIFO that nobody reads, or writes to, must not hold up the start.
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW)
    try:
        file = os.open(path, flags, 0o666, dir_fd=folder)
    except OSError as error:
        if odd := _ODD.get(error.errno or 0):
            raise OSError(error.errno, odd, str(path)) from error
        raise
    facts, number = os.fstat(file), 0
    if not stat.S_ISREG(facts.st_mode):
        number, odd = errno.ENXIO, _ODD[errno.ENXIO]
    elif alone and facts.st_nlink > 1:
        number, odd = errno.EINVAL, "has another name, by a hard link: copy it to a file of its own"
    if number:
        os.close(file)
        raise OSError(number, odd, str(path))
    return file


def read_bounded(path: Path, most: int = 16 << 20) -> bytes:
    """Reads a file that the user named, which may be a pipe, up to a limit of bytes.

    Raises:
        OSError: If it can't be read, or has more: a device may have no end.
    """
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"more than {most >> 20} MiB", str(path))
    return data


def open_inside(path: Path) -> int:
    """Opens a regular file of an untrusted folder for reading; follows no link.

    Raises:
        OSError: If it can't be opened, or is a link, a FIFO or a device; strerror says which.
    """
    return open_own(real_inside(path), os.O_RDONLY, alone=False)


def real_inside(path: Path) -> Path:
    """The path, or what it leads to where that is a file of Hugging Face's cache.

    A snapshot there holds links to the folder `blobs` beside `snapshots`.
    """
    if os.path.islink(path):  # noqa: PTH114
        folder, target = Path(os.path.realpath(path.parent)), Path(os.path.realpath(path))
        blobs = [one.parent / "blobs" for one in folder.parents if one.name == "snapshots"]
        if target.parent in blobs:
            return target
    return path


def read_inside(path: Path, most: int) -> bytes:
    """Reads a file of such a folder.

    Raises:
        OSError: As `open_inside`; or if it is larger than the limit.
    """
    with os.fdopen(open_inside(path), "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"is larger than {most >> 20} MiB", str(path))
    return data


def lines_inside(path: Path) -> Iterator[bytes]:
    """The lines of such a file, each with its end; a last one without is what a kill leaves.

    Raises:
        OSError: As `open_inside`; or for a line of more than 64 MiB, which no record has.
    """
    with os.fdopen(open_inside(path), "rb") as file:
        while line := file.readline(_LINE + 1):
            if len(line) > _LINE:
                raise OSError(errno.EFBIG, f"a line is longer than {_LINE >> 20} MiB", str(path))
            yield line


def hash_inside(path: Path) -> str:
    """SHA-256 of a file of such a folder, hexadecimal.

    Raises:
        OSError: As `open_inside`.
    """
    with os.fdopen(open_inside(path), "rb") as file:
        return hash_of_rest(file)


def hash_of_rest(file: BinaryIO) -> str:
    """SHA-256 of an open file, from where it stands, hexadecimal."""
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def cache_folder(name: str) -> Path:
    """Returns a folder of ours in the user's cache: XDG_CACHE_HOME/trainer/NAME."""
    home = Path(os.environ.get("HOME") or "/", ".cache")
    return Path(os.environ.get("XDG_CACHE_HOME") or home, "trainer", name)


def own_folder(path: Path) -> Path:
    """Makes a folder, if there is none; its parent must exist.

    Raises:
        OSError: If it can't be made, or is a link (see strerror).
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir()
    if odd := oddity(path, folder=True):
        raise OSError(errno.ENOTDIR, odd, str(path))
    return path


def copy_folder(path: Path, to: Path) -> None:
    """Copies a folder, but for what in it is neither a regular file nor a folder: links lead anywhere."""

    def odd(folder: str, inside: list[str]) -> list[str]:
        return [name for name in inside if all(oddity(Path(folder, name), kind) for kind in (True, False))]

    shutil.copytree(path, to, ignore=odd)


def oddity(path: Path, folder: bool) -> str:
    """Names what stands in the place of a folder, or of a regular file; empty if it is one, or absent."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return ""
    if stat.S_ISLNK(mode):
        return "is a symbolic link"
    if folder:
        return "" if stat.S_ISDIR(mode) else "isn't a folder"
    return "" if stat.S_ISREG(mode) else "isn't a regular file"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock that one process of this machine can have at a time; others wait. The empty file stays."""
    file = open_own(path, os.O_RDWR | os.O_CREAT, alone=False)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)
