"""Samples that are files: in class folders, or named by a table or by annotations."""

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt

from trainer.config.data import DataConfig
from trainer.data.check import Wrong, unreadable, unreadable_line
from trainer.data.dataset import spread
from trainer.data.formats.index import Index, index_of
from trainer.data.formats.labels import folded, in_order, quoted
from trainer.data.formats.records import Records
from trainer.data.left_out import LeftOut, by_suffix, left_out_line, one, tally
from trainer.data.shared import names_in
from trainer.errors import BadInputError

_JPEG = (".jpg", ".jpeg", ".jfif", ".jpe")
_JPEG2000 = (".jp2", ".j2k", ".j2c", ".jpc", ".jpf", ".jpx")
IMAGES = (*_JPEG, ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".avif", *_JPEG2000)

# Numbers of files whose size, and whose content, are in the fingerprint.
_SIZES, CONTENTS = 10_000, 32
_FARTHEST = 3  # components at the end of a path that are searched for by themselves, for a hint
LARGEST_FILE = 2 << 30  # bytes, above the size of the largest image that is decoded, in any format


class ListFile(NamedTuple):
    """File that lists the paths of samples.

    Attributes:
        file: Path of the table or the annotations.
        unit: What stands for a sample in it: "line", "row" or "image".
    """

    file: Path
    unit: str


class Files(Records):
    """Files below a folder, each a sample.

    Args:
        root: The folder.
        index: The files: `name` is a path relative to the folder, and where a file lists them `number` that
            of a line or row, or the id of an image.
        listed: File that lists the paths; None if the folder was searched for them.
    """

    def __init__(self, root: Path, index: Index, listed: ListFile | None = None) -> None:
        super().__init__(index)
        self._root, self._listed = os.fsencode(root), listed

    def fingerprint(self) -> str:
        """Returns the sample count and a hash of classes, all paths and labels, 10,000 sizes and 32 contents.

        A size takes a round trip on a network file system: too long for all of a million files.
        """
        digest = hashlib.sha256(repr(tuple(self.classes)).encode())
        for column in ("name", "name_end", "label"):
            digest.update(self._columns[column].tobytes())
        if self.sets is not None:
            digest.update(self.sets.tobytes())
        for sample in spread(len(self), _SIZES).tolist():
            digest.update(f"{size_of(self.path(sample))} ".encode())
        for sample in spread(len(self), CONTENTS).tolist():
            with contextlib.suppress(OSError):  # training on it raises the error
                digest.update(_content(self.path(sample)))
        return f"{len(self)} samples {digest.hexdigest()[:16]}"

    def contents(self) -> npt.NDArray[Any] | None:
        """See `Records.contents`: by paths, which are distinct where folders were searched."""
        if self._listed is None:
            return None
        root = os.path.realpath(self._root)
        paths = (os.path.join(root, name) for name in plain_names(self._root, names_in(self._columns)))  # noqa: PTH118
        return np.fromiter(map(hash, paths), np.int64, len(self))

    def absent(self) -> str:
        """See `Records.absent`."""
        names = names_in(self._columns)
        wrong = unreadable(self._root, names)
        if wrong:
            number, reason = wrong[0]
            wrong[0] = Wrong(number, reason + hint(self._root, names[number]))
        if self._listed is None:
            what = f"files below {readable(self._root)}"
            return unreadable_line(wrong, len(self), what, self.name, "mend or remove what is wrong")
        table, unit = self._listed

        def listed_name(sample: int) -> str:
            return f"{unit} {self._columns['number'][sample]}: {self.name(sample)}"

        remedy = f"add it, or take its {unit} out (paths are relative to {readable(self._root)})"
        return unreadable_line(wrong, len(self), f"files named in {table}", listed_name, remedy)

    @property
    def numbers(self) -> list[int]:
        """Number of the line or row of each sample, or the id of its image."""
        numbers: list[int] = self._columns["number"].tolist()
        return numbers

    def name(self, sample: int) -> str:
        """Returns the path of a sample as printable text."""
        return readable(self.path(sample))

    def read(self, sample: int) -> bytearray:
        """See `Records.read`."""
        try:
            return self._as_before(sample, _content(self.path(sample)))
        except OSError as error:
            raise BadInputError(
                f"{self.name(sample)}: can't be read ({error.strerror or error}); was it moved meanwhile?"
            ) from error

    def path(self, sample: int) -> bytes:
        """Returns the path of a sample, with `root`."""
        return os.path.join(self._root, self.file_name(sample))  # noqa: PTH118  (bytes)


def open_sample_file(path: bytes | Path) -> tuple[int, os.stat_result]:
    """Opens a regular file for reading; returns its descriptor, which the caller closes, and its status.

    Raises:
        OSError: If it can't be opened, or is a folder, a pipe or a device.
    """
    # O_NONBLOCK: opening a pipe without a writer would block.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    facts = os.fstat(file)
    if not stat.S_ISREG(facts.st_mode):
        os.close(file)
        raise OSError(0, "isn't a file")
    return file, facts


def read_exactly(file: int, start: int, count: int) -> bytearray:
    """Reads `count` bytes from byte `start` on of an open file, given by its descriptor.

    Raises:
        OSError: If the file ends earlier.
    """
    data = bytearray(count)
    fill_exactly(file, start, memoryview(data))
    return data


def fill_exactly(file: int, start: int, view: memoryview) -> None:
    """Fills memory with the bytes from byte `start` on of an open file, given by its descriptor.

    Raises:
        OSError: If the file ends earlier.
    """
    done = 0
    while done < len(view):
        got = os.preadv(file, [view[done:]], start + done)
        if not got:
            raise OSError(0, f"ends after {start + done:,} bytes")
        done += got


def readable(path: bytes) -> str:
    """Returns a path as printable text; bytes that aren't UTF-8 are escaped."""
    return path.decode("utf-8", "backslashreplace")


def in_folder(
    root: Path, suffixes: Sequence[str] = IMAGES, leave_out: Sequence[str] = (), kind: type[Files] = Files
) -> Files:
    """Finds the samples `root/<class>/**/<file>`, sorted by class and path.

    Args:
        root: The folder.
        suffixes: Suffixes of samples, in lower case.
        leave_out: Names of entries of `root` to ignore, as they aren't classes.
        kind: Class of the result, `Files` or a subclass.

    Raises:
        BadInputError: If the folder is missing, can't be listed, or holds no samples or a broken link.
    """
    left_out = list[LeftOut]()
    try:
        if not root.is_dir():
            raise BadInputError(f"{root}: no such folder; data.path needs train/<class>/ and val/<class>/")
        folders = _classes(root, leave_out, left_out)
        above = tuple(_inode(each.stat()) for each in (root, *root.resolve().parents))
        files = [
            (number, os.fsencode(name) + b"/" + path)
            for number, name in enumerate(folders)
            for path in sorted(_below(os.fsencode(root / name), suffixes, left_out, os.fsencode(name), above))
        ]
    except OSError as error:
        where = readable(os.fsencode(error.filename)) if error.filename else root
        raise BadInputError(f"{where}: can't be listed ({error.strerror})") from error
    left_out = sorted(left_out, key=lambda each: each.first)
    if not files:
        more = f"; {left_out_line(tally(left_out))}" if left_out else ""
        raise BadInputError(f"{root}: no files ({', '.join(suffixes)}) below its class folders{more}")
    names = [readable(os.fsencode(name)) for name in folders]
    return kind(root, index_of([path for _, path in files], [number for number, _ in files], names, left_out))


def _classes(root: Path, leave_out: Sequence[str], left_out: list[LeftOut]) -> list[str]:
    """Returns the names of the class folders in order; other entries are appended to `left_out`.

    Raises:
        BadInputError: If an entry is a broken link.
    """
    folders = list[str]()
    for entry in sorted(root.iterdir()):
        if entry.name in leave_out:
            continue
        # It may be a class, which would be missing without an error.
        if entry.is_symlink() and not entry.exists():
            raise BadInputError(f"{entry}: a link that leads nowhere; mend or remove it")
        if not entry.is_dir():
            hidden = entry.name.startswith(".")
            left_out.append(
                one("hidden file{s}" if hidden else "file{s} beside the class folders", entry.name)
            )
        elif entry.name.startswith("."):
            left_out.append(one("hidden folder{s}", entry.name))
        else:
            folders.append(entry.name)
    return in_order(folders)


def folder_split(config: DataConfig, path: Path, split: str) -> Files:  # noqa: ARG001
    """Finds the samples `path/split/<class>/**/<file>`, see `in_folder`."""
    return in_folder(path / split)


def _below(
    folder: bytes,
    suffixes: Sequence[str],
    left_out: list[LeftOut],
    shown: bytes,
    above: tuple[tuple[int, int], ...],
    prefix: bytes = b"",
) -> Iterator[bytes]:
    """Yields the paths of files below a folder that have one of the suffixes, relative to it, in any order.

    Args:
        folder: Path of the folder.
        suffixes: Suffixes in lower case.
        left_out: Receives files that aren't yielded.
        shown: Path of the folder in `left_out`.
        above: Device and inode of each parent folder.
        prefix: Put before the paths that are yielded.
    """
    above = (*above, _inode(os.stat(folder)))  # noqa: PTH116  (bytes)
    with os.scandir(folder) as entries:
        for entry in entries:
            name, path = os.fsdecode(entry.name), shown + b"/" + entry.name
            is_folder = _is_folder(entry)
            if name.startswith("."):
                left_out.append(one("hidden folder{s}" if is_folder else "hidden file{s}", path))
            elif is_folder and _inode(entry.stat()) in above:
                left_out.append(one("link{s} to a folder that it lies in", path))
            elif is_folder:
                yield from _below(entry.path, suffixes, left_out, path, above, prefix + entry.name + b"/")
            elif name.lower().endswith(tuple(suffixes)):
                yield prefix + entry.name
            else:
                left_out.append(one(by_suffix(name), path))


def unlisted(
    reason: str,
    root: Path,
    suffixes: Sequence[str],
    *lists: Iterable[str | bytes],
    below: Sequence[bytes] = (b"",),
    deep: bool = True,
) -> list[LeftOut]:
    """Counts the files that lie in a folder and that no list names; returns [] if there are none.

    Each folder is listed once; no file is looked up. A folder that can't be listed counts as empty.

    Args:
        reason: Reason, as of `LeftOut`.
        root: Folder that the names are relative to.
        suffixes: Suffixes of the files that count, in lower case. Hidden files and folders don't.
        lists: Paths, relative or absolute. A list is read only if the ones before don't name all files.
        below: Paths of the folders that are searched, relative to `root`; empty: `root` itself.
        deep: True to search the folders below, too.
    """
    start, ends = os.path.join(os.fsencode(root), b""), tuple(map(os.fsencode, suffixes))  # noqa: PTH118
    found, seen = set[bytes](), set[tuple[int, int]]()
    for place in below:
        for folder, folders, files in os.walk(start + place, followlinks=True):
            inode, at = _inode(os.stat(folder)), os.path.join(folder, b"")  # noqa: PTH116, PTH118  (bytes)
            # Links last, so that a folder inside that is linked, too, is looked at by its own path.
            folders.sort(key=lambda name, at=at: os.path.islink(at + name))  # type: ignore[misc]  # noqa: PTH114
            if inode in seen or not deep:
                folders.clear()
            folders[:] = [name for name in folders if not name.startswith(b".")]
            if inode not in seen:
                named = [name for name in files if name.lower().endswith(ends) and not name.startswith(b".")]
                found.update((at + name)[len(start) :] for name in named)
            seen.add(inode)
    for names in lists:
        if found:
            found.difference_update(plain_names(root, map(os.fsencode, names)))
    return [one(reason, min(found)).model_copy(update={"count": len(found)})] if found else []


def plain_names(root: bytes | Path, names: Iterable[bytes]) -> Iterator[bytes]:
    """Yields paths relative to a folder in one spelling: "./a.png" and "/data/a.png" may be "a.png"."""
    start = os.fsencode(root)
    for name in names:
        odd = name.startswith(b"/") or b"./" in name or b"//" in name
        yield os.path.relpath(os.path.join(start, name), start) if odd else name  # noqa: PTH118  (bytes)


def _inode(facts: os.stat_result) -> tuple[int, int]:
    return facts.st_dev, facts.st_ino


def _is_folder(entry: os.DirEntry[bytes]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno != errno.ELOOP:  # a link to itself, which `absent` reports as a file
            raise
        return False


def size_of(path: bytes | Path) -> int:
    """Returns the size of a file in bytes; -1 if it can't be read."""
    try:
        return os.stat(path).st_size  # noqa: PTH116
    except OSError:
        return -1


def _content(path: bytes) -> bytearray:
    """Returns all bytes of a regular file; raises as `open_sample_file` and `read_exactly` do."""
    file, facts = open_sample_file(path)
    try:
        return read_exactly(file, 0, facts.st_size)
    finally:
        os.close(file)


def hint(root: bytes, name: bytes) -> str:
    """Returns a hint such as "; there is 'a/x.jpg': write it so"; "" if no existing name is similar.

    Similar names differ in Unicode form, case, spaces, slashes, percent-encoding or folders.

    Args:
        root: Folder that the name is relative to.
        name: The name that doesn't exist.
    """
    if os.path.lexists(os.path.join(root, name)):  # noqa: PTH118  (bytes)
        return ""
    text = os.fsdecode(name)
    url = "; this is a URL: fetch the files, and write their names" if "://" in text else ""
    parts = [part for part in text.replace("\\", "/").split("/") if part.strip(". ")]
    for first in dict.fromkeys((0, *range(max(0, len(parts) - _FARTHEST), len(parts)))):
        if similar := _similar(root, parts[first:]):
            return f"{url}; there is {quoted(similar)}: write it so"
    return url


def _seen(name: str) -> str:
    """Returns a key that is equal for names that differ in Unicode form, case, spaces or percent-encoding."""
    return folded(unquote(name)).casefold()


def _similar(root: bytes, parts: Sequence[str]) -> str:
    """Returns a path below a folder that is similar to these components; "" if there is none."""
    path = ""
    for part in parts:
        try:
            entries = os.listdir(os.path.join(root, os.fsencode(path)))  # noqa: PTH118, PTH208  (bytes)
        except OSError:
            return ""
        names = sorted(map(os.fsdecode, entries))
        wanted = part if part in names else next((each for each in names if _seen(each) == _seen(part)), "")
        if not wanted:
            return ""
        path = os.path.join(path, wanted)  # noqa: PTH118
    return path
