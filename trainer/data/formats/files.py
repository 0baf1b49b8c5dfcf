"""Samples that are files, in a folder of classes."""

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trainer.config.data import DataConfig
from trainer.data.check import Wrong, unreadable, unreadable_line
from trainer.data.dataset import spread
from trainer.data.formats.labels import in_order
from trainer.data.formats.names import hint
from trainer.data.formats.records import Records
from trainer.data.left_out import LeftOut, by_suffix, left_out_line, one, tally
from trainer.data.shared import Columns, name_columns
from trainer.errors import BadInputError

_JPEG = (".jpg", ".jpeg", ".jfif", ".jpe")
_JPEG2000 = (".jp2", ".j2k", ".j2c", ".jpc", ".jpf", ".jpx")
IMAGES = (*_JPEG, ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".avif", *_JPEG2000)

# Of how many files the fingerprint holds the size, and of how many the content.
_SIZES, _CONTENTS = 10_000, 32
LARGEST_FILE = 2 << 30  # more than an image of as many pixels as are decoded has in any format


class Listed(NamedTuple):
    """Source of the names of files.

    Attributes:
        file: A table or annotations.
        unit: What of it names one: "line", "row", "image".
        numbers: Of the line, row or image of each.
    """

    file: Path
    unit: str
    numbers: Sequence[int]


class Files(Records):
    """Files below a root, each a sample.

    Args:
        root: A folder.
        names: Paths below it, in the order of the samples.
        labels: The class of each.
        classes: Their names.
        listed: Where the names are written down, if they aren't those that the folder holds.
        left_out: What lies beside them and isn't read.
    """

    def __init__(
        self,
        root: Path,
        names: list[bytes],
        labels: Sequence[int],
        classes: Sequence[str],
        listed: Listed | None = None,
        left_out: Iterable[LeftOut] = (),
    ) -> None:
        self._root = os.fsencode(root)
        self.left_out = tally(left_out)
        self.classes: Sequence[str] = tuple(classes)
        columns = {**name_columns(names), "label": np.asarray(labels, dtype=np.int64)}
        self._listed = None if listed is None else listed[:2]
        if listed is not None:
            columns["number"] = np.asarray(listed.numbers, dtype=np.int64)
        self._columns = Columns.hold(columns)

    def fingerprint(self) -> str:
        """Fingerprint of all names and labels, the sizes of some files and the content of a few.

        Asking for a size is a round trip on a network file system: not for each of a million files.
        """
        digest = hashlib.sha256(repr(tuple(self.classes)).encode())
        for column in ("name", "name_end", "label"):
            digest.update(self._columns[column].tobytes())
        for sample in spread(len(self), _SIZES).tolist():
            digest.update(f"{_size(self.path(sample))} ".encode())
        for sample in spread(len(self), _CONTENTS).tolist():
            with contextlib.suppress(OSError):  # who trains on it says which it is
                digest.update(_content(self.path(sample)))
        return f"{len(self)} samples {digest.hexdigest()[:16]}"

    def absent(self) -> str:
        """See `Records.absent`."""
        text, ends = self._columns["name"].tobytes(), self._columns["name_end"].tolist()
        names = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        wrong = unreadable(self._root, names)
        if wrong:
            number, reason = wrong[0]
            wrong[0] = Wrong(number, reason + hint(self._root, names[number]))
        if self._listed is None:
            what = f"files below {readable(self._root)}"
            return unreadable_line(wrong, len(self), what, self.name, "mend or remove what is wrong")
        table, unit = self._listed

        def place(sample: int) -> str:
            return f"{unit} {self._columns['number'][sample]}: {self.name(sample)}"

        remedy = f"add it, or take its {unit} out (paths are relative to {readable(self._root)})"
        return unreadable_line(wrong, len(self), f"files named in {table}", place, remedy)

    def name(self, sample: int) -> str:
        """Path, readable."""
        return readable(self.path(sample))

    def read(self, sample: int) -> bytearray:
        """See `Records.read`."""
        try:
            return _content(self.path(sample))
        except OSError as error:
            raise BadInputError(
                f"{self.name(sample)}: can't be read ({error.strerror or error}); was it moved meanwhile?"
            ) from error

    def path(self, sample: int) -> bytes:
        """Path of a sample."""
        return os.path.join(self._root, self.file_name(sample))  # noqa: PTH118  (bytes)


class NotAFileError(OSError):
    """Error for a folder, a pipe or a device in the place of a file."""


def open_sample_file(path: bytes | Path) -> tuple[int, os.stat_result]:
    """Opens a regular file for reading.

    Raises:
        NotAFileError: If it is something else.
        OSError: If it can't be opened.
    """
    # O_NONBLOCK: a pipe that nobody writes to would keep its reader waiting.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    facts = os.fstat(file)
    if not stat.S_ISREG(facts.st_mode):
        os.close(file)
        raise NotAFileError(0, "isn't a file")
    return file, facts


def read_exactly(file: int, start: int, count: int) -> bytearray:
    """Bytes of an open file.

    Raises:
        OSError: If there are fewer, or more than any image has.
    """
    if count > LARGEST_FILE:
        raise OSError(errno.EFBIG, f"has {count:,} bytes, and an image {LARGEST_FILE:,} at most")
    data = bytearray(count)
    fill_exactly(file, start, memoryview(data))
    return data


def fill_exactly(file: int, start: int, view: memoryview) -> None:
    """Fills memory with bytes of an open file.

    Raises:
        OSError: If there are fewer.
    """
    done = 0
    while done < len(view):
        got = os.preadv(file, [view[done:]], start + done)
        if not got:
            raise OSError(0, f"ends after {start + done:,} bytes")
        done += got


def readable(path: bytes) -> str:
    """A path that can be printed, whatever bytes it is made of."""
    return path.decode("utf-8", "backslashreplace")


def in_folder(
    root: Path, suffixes: Sequence[str] = IMAGES, leave_out: Sequence[str] = (), kind: type[Files] = Files
) -> Files:
    """`root/<class>/**/<file>`, in the order of the classes and then of the paths.

    Args:
        root: The folder.
        suffixes: Of the files that count, in lower case.
        leave_out: Names below the root that are no classes.
        kind: What is made of them: `Files`, or a class derived from it that reads other contents.

    Raises:
        BadInputError: If the folder is missing or holds none.
    """
    if not root.is_dir():
        raise BadInputError(f"{root}: no such folder; data.path needs train/<class>/ and val/<class>/")
    left_out = list[LeftOut]()
    try:
        folders = _classes(root, leave_out, left_out)
        above = tuple(_place(each.stat()) for each in (root, *root.resolve().parents))
        found = [
            (number, os.fsencode(name) + b"/" + path)
            for number, name in enumerate(folders)
            for path in sorted(_below(os.fsencode(root / name), suffixes, left_out, os.fsencode(name), above))
        ]
    except OSError as error:
        where = readable(os.fsencode(error.filename)) if error.filename else root
        raise BadInputError(f"{where}: can't be listed ({error.strerror})") from error
    left_out = sorted(left_out, key=lambda each: each.first)
    if not found:
        more = f"; {left_out_line(tally(left_out))}" if left_out else ""
        raise BadInputError(f"{root}: no files ({', '.join(suffixes)}) below its class folders{more}")
    names = [readable(os.fsencode(name)) for name in folders]
    return kind(root, [path for _, path in found], [number for number, _ in found], names, left_out=left_out)


def _classes(root: Path, leave_out: Sequence[str], left_out: list[LeftOut]) -> list[str]:
    """Names of the class folders, in their order; what else lies there is left out."""
    folders = list[str]()
    for entry in sorted(root.iterdir()):
        if entry.name in leave_out:
            continue
        if entry.is_symlink() and not entry.exists():  # a class, else lost
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
    """Opens `path/split/CLASS/…`, see `in_folder`."""
    return in_folder(path / split)


def _below(
    folder: bytes,
    suffixes: Sequence[str],
    left_out: list[LeftOut],
    shown: bytes,
    above: tuple[tuple[int, int], ...],
    prefix: bytes = b"",
) -> Iterator[bytes]:
    """Yields the files below a folder that have one of these suffixes, in any order.

    Args:
        folder: Its path.
        suffixes: In lower case.
        left_out: Takes what isn't yielded.
        shown: The folder's name, for people.
        above: Device and inode of each folder that it lies in.
        prefix: Of what is yielded.
    """
    above = (*above, _place(os.stat(folder)))  # noqa: PTH116  (bytes)
    with os.scandir(folder) as entries:
        for entry in entries:
            name, path = os.fsdecode(entry.name), shown + b"/" + entry.name
            is_folder = _is_folder(entry)
            if name.startswith("."):
                left_out.append(one("hidden folder{s}" if is_folder else "hidden file{s}", path))
            elif is_folder and _place(entry.stat()) in above:
                left_out.append(one("link{s} to a folder that it lies in", path))
            elif is_folder:
                yield from _below(entry.path, suffixes, left_out, path, above, prefix + entry.name + b"/")
            elif name.lower().endswith(tuple(suffixes)):
                yield prefix + entry.name
            else:
                left_out.append(one(by_suffix(name), path))


def _place(facts: os.stat_result) -> tuple[int, int]:
    return facts.st_dev, facts.st_ino


def _is_folder(entry: os.DirEntry[bytes]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno != errno.ELOOP:  # a link to itself: no folder, and no file, as `absent` says
            raise
        return False


def _size(path: bytes) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116
    except OSError:
        return -1


def _content(path: bytes) -> bytearray:
    file, facts = open_sample_file(path)
    try:
        return read_exactly(file, 0, facts.st_size)
    finally:
        os.close(file)
