"""Tar shards in WebDataset's layout, indexed once and then read at random.

A sample is the members whose names are equal up to the first dot: `0001.jpg` with `0001.cls` (a label as
text) or `0001.json` (with a key "label"; .cls is preferred). All other files in or beside the shards are
counted. See https://github.com/webdataset/webdataset.
"""

import os
import posixpath
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trainer.config.data import DataConfig
from trainer.data.dataset import spread
from trainer.data.formats.files import CONTENTS, IMAGES, read_exactly, readable
from trainer.data.formats.index import Index, content_hash, index_folder, index_of, kept
from trainer.data.formats.labels import LabelError, label_of, numbered
from trainer.data.formats.sharded import (
    COLUMNS,
    COMPRESSED,
    INDEX,
    PACKED,
    TAR_SHARDS,
    About,
    Shard,
    ShardedRecords,
    ShardFolder,
    about_of,
    in_shards,
    write_index,
)
from trainer.data.formats.signatures import what_lies_at
from trainer.data.left_out import LeftOut, by_suffix, left_out_line, one, tally
from trainer.data.shared import Columns
from trainer.errors import BadInputError, first_line, reading
from trainer.host import strict_json
from trainer.host.files import read_hashed
from trainer.observe.console import say

_CHUNK, _BEGIN = 1 << 20, 1 << 12
_MEND = "make the shard again"
_TALLIED = 1000  # entries of `left_out` after which they are summed


def members(file: Path, left_out: list[LeftOut]) -> Iterator[tarfile.TarInfo]:
    """Yields the regular files of an archive; checks its end, as `tarfile` takes a damaged header for it.

    Args:
        file: The archive.
        left_out: Receives members that aren't yielded, and an end without a mark.

    Raises:
        BadInputError: If the archive is damaged or truncated.
        OSError: If it can't be read.
    """
    try:
        with tarfile.open(file, "r:", encoding="utf-8", errors="surrogateescape") as tar:
            for member in tar:
                tar.members.clear()  # type: ignore[attr-defined]  # `tarfile` keeps all members, 1 kB each
                if reason := _left_out(member):
                    left_out.append(one(reason, f"{file.name}: '{member.name}'"))
                    if len(left_out) > _TALLIED:
                        left_out[:] = tally(left_out)
                elif member.isfile():
                    yield member
            end = tar.offset
    # MemoryError, OverflowError and RecursionError: huge sizes, nested extended headers.
    except (tarfile.TarError, ValueError, MemoryError, OverflowError, RecursionError) as error:
        what = what_lies_at(file)
        said = str(error) if what.startswith("a tar") else what or str(error)
        raise BadInputError(f"{file}: not a readable tar file ({said})") from error
    with file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(end)
        if any(chunk.strip(b"\0") for chunk in iter(lambda: stream.read(_CHUNK), b"")):
            raise BadInputError(
                f"{file}: ends at byte {end:,}, and more lies behind: a damaged or cut header, or a second "
                f"archive; {_MEND}"
            )
    if end >= size:
        reason = "end{s} of an archive, which has no mark, as if it were cut off"
        left_out.append(one(reason, f"{file.name}, at byte {size:,}"))


def _left_out(member: tarfile.TarInfo) -> str:
    """Returns the reason for leaving out a member; "" for a file that is read, and for a folder."""
    if any(part.startswith(".") and part != "." for part in member.name.split("/")):
        return "" if member.isdir() else "hidden member{s}"
    if member.isdir() or (member.isfile() and not member.issparse()):
        return ""
    return "link{s}, sparse and special member{s}"


_LABELS = ("cls", "json")

_Group = dict[str, tarfile.TarInfo]


class _Sample(NamedTuple):
    name: bytes
    label: str
    offset: int
    size: int
    digest: int


def tars_split(config: DataConfig, path: Path, split: str) -> ShardedRecords:
    """Opens `path/split`: by the index beside its shards if there is one, else by its own, see `in_tars`."""
    folder = path / split
    return in_shards(folder) if (folder / INDEX).exists() else in_tars(folder, index_folder(config.index))


def in_tars(folder: Path, indexes: Path) -> ShardedRecords:
    """Opens tar shards without an index beside them: they are read once, and their index is kept.

    Args:
        folder: Folder of uncompressed .tar files.
        indexes: Folder in which the index is kept.

    Raises:
        BadInputError: If there are no tar files, or one is invalid.
    """
    files, beside = tar_files(folder)
    facts = [file.stat() for file in files]
    made_from = [
        [file.name, one.st_size, one.st_mtime_ns, _hash_of_begin(file)]
        for file, one in zip(files, facts, strict=True)
    ]

    def make() -> Index:
        size = sum(one.st_size for one in facts) / 1e9
        say(f"{folder}: {len(files):,} shards of {size:,.3g} GB are read once, for their index")
        return list_shards(folder, files, beside)

    for anew in (False, True):
        index = kept(indexes, ["tars", *made_from], make, anew=anew)
        records = ShardedRecords(
            about_of(index, "files", TAR_SHARDS), Columns.hold(index.columns), ShardFolder(folder)
        )
        records.left_out = tally((*index.left_out, *beside))
        if all(records.is_whole(sample) for sample in spread(len(records), CONTENTS).tolist()):
            break
    return records


def _hash_of_begin(file: Path) -> int:
    """Returns the hash of a shard's first bytes: other sets may have the same names, sizes and times."""
    with reading(file), file.open("rb") as opened:
        return content_hash(opened.read(_BEGIN))


def index_shards(folder: Path, advance: Callable[[int], object] = lambda _: None, image: str = "") -> About:
    """Reads every tar file of a folder and writes an index beside them.

    Args:
        folder: Folder of uncompressed .tar files.
        advance: Called with the number of bytes that have been read.
        image: Suffix of the image, if samples have several; "" for the only one.

    Raises:
        BadInputError: If there are no tar files, or one is invalid.
    """
    files, beside = tar_files(folder)
    index = list_shards(folder, files, beside, advance, image)
    index = index._replace(left_out=tally((*beside, *index.left_out)))
    return write_index(folder, index, about_of(index, "files", TAR_SHARDS))


def list_shards(
    folder: Path,
    files: Sequence[Path],
    beside: Sequence[LeftOut],
    advance: Callable[[int], object] = lambda _: None,
    image: str = "",
) -> Index:
    """Lists the samples of tar files; see `index_shards`."""
    left_out = list[LeftOut]()
    if not files:
        compressed = next((folder / one.first for one in beside if one.reason == PACKED), None)
        if compressed:
            raise BadInputError(f"{compressed}: compressed tar can't be read at random; unpack it to .tar")
        raise BadInputError(
            f"{folder}: no .tar files here; other data of this machine need no index, and none is served by "
            "https or s3 but packs, which have one"
        )
    shards, samples, numbers = [], list[_Sample](), list[int]()
    for number, file in enumerate(files):
        try:
            in_file = list(_samples(file, image.lower().lstrip("."), left_out))
            size = file.stat().st_size
            with file.open("rb") as stream:
                sha256 = read_hashed(stream.fileno(), size, None, advance)
            shards.append(Shard(name=file.name, bytes=size, sha256=sha256).model_dump())
        except (OSError, ValueError) as error:  # ValueError: a name that no index holds, or the file shrank
            reason = getattr(error, "strerror", None) or first_line(error)
            raise BadInputError(f"{readable(os.fsencode(file))}: can't be read ({reason})") from error
        samples += in_file
        left_out = list(tally(left_out))
        numbers += [number] * len(in_file)
    if not samples:
        none = tally((*beside, *left_out))
        more = f"; {left_out_line(none)}" if none else ""
        raise BadInputError(
            f"{folder}: its tar files hold no sample with an image and a label (.cls, .json){more}"
        )
    try:
        labels, classes = numbered([sample.label for sample in samples])
    except LabelError as error:
        where = f"{folder / files[numbers[error.at]].name}: '{readable(samples[error.at].name)}'"
        raise BadInputError(f"{where}: {error}; write both alike") from error
    return index_of(
        [sample.name for sample in samples],
        labels,
        classes,
        left_out,
        shard=np.array(numbers, np.int32),
        offset=np.array([sample.offset for sample in samples], np.int64),
        bytes=np.array([sample.size for sample in samples], np.int64),
        hash=np.array([sample.digest for sample in samples], np.uint64),
    )._replace(facts={"shards": shards})


def tar_files(folder: Path) -> tuple[list[Path], list[LeftOut]]:
    """Returns the uncompressed tar files of a folder, and the other files, which are left out."""
    files, left_out = list[Path](), list[LeftOut]()
    for file in sorted(folder.iterdir()) if folder.is_dir() else []:
        if file.name in (INDEX, COLUMNS, f".{INDEX}", f".{COLUMNS}"):
            continue
        reason = by_suffix(file.name)
        if reason == ".tar" and file.is_file():
            files.append(file)
        elif reason == ".tar" and not file.is_dir():
            left_out.append(one("pipe{s}, device{s} and link{s} to nowhere", file.name))
        elif reason in COMPRESSED:
            left_out.append(one(PACKED, file.name))
        else:
            left_out.append(one("folder{s} beside the shards" if file.is_dir() else reason, file.name))
    return files, left_out


def _samples(file: Path, chosen: str, left_out: list[LeftOut]) -> Iterator[_Sample]:
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for group in _groups(file, left_out):
            yield from _sample(file, descriptor, group, chosen, left_out)
            if len(left_out) > _TALLIED:
                left_out[:] = tally(left_out)
    finally:
        os.close(descriptor)


def _groups(file: Path, left_out: list[LeftOut]) -> Iterator[_Group]:
    """Yields the members of each sample by suffix, in lower case.

    Raises:
        BadInputError: If a name occurs twice, or the members of a sample aren't adjacent.
    """
    group, key, done = _Group(), "", set[int]()  # hashes, to save memory
    for member in members(file, left_out):
        folder, _, base = member.name.rpartition("/")
        stem, _, suffix = base.partition(".")
        suffix = suffix.lower()
        if (own := f"{posixpath.normpath(folder)}/{stem}") != key:
            yield group
            done.add(hash(key))
            group, key = _Group(), own
        if suffix in group or (hash(key) in done and (suffix in _LABELS or f".{suffix}" in IMAGES)):
            name = readable(os.fsencode(member.name))
            if suffix in group:
                other = readable(os.fsencode(group[suffix].name))
                raise BadInputError(f"{file}: '{other}' and '{name}' are one name; {_MEND}")
            raise BadInputError(
                f"{file}: '{name}' lies apart from the rest of its sample, or is there twice; {_MEND} "
                "(tar --sort=name)"
            )
        group[suffix] = member
    yield group


def _image(file: Path, group: _Group, chosen: str) -> tarfile.TarInfo | None:
    """Returns the image of a sample, or None.

    Raises:
        BadInputError: If there are several, and none is chosen by its suffix.
    """
    if chosen:
        return group.get(chosen)
    images = [member for suffix, member in group.items() if f".{suffix}" in IMAGES]
    if len(images) > 1:
        first, second = (readable(os.fsencode(member.name)) for member in images[:2])
        raise BadInputError(
            f"{file}: '{first}' and '{second}' are two images of one sample; choose by its suffix: trainer "
            f"data index --image {second.rpartition('/')[2].partition('.')[2]}"
        )
    return images[0] if images else None


def _sample(
    file: Path, descriptor: int, group: _Group, chosen: str, left_out: list[LeftOut]
) -> Iterator[_Sample]:
    image = _image(file, group, chosen)
    label = group.get("cls") or group.get("json")
    if image is None or label is None:
        left_out += _incomplete(file, group, image)
        return
    name = os.fsencode(image.name)
    left_out += [
        one(f".{suffix}" if suffix else "file{s} without a suffix", f"{file.name}: '{member.name}'")
        for suffix, member in group.items()
        if member is not image and suffix not in _LABELS
    ]
    data = read_exactly(descriptor, label.offset_data, label.size)
    try:
        cls = "cls" in group
        text = label_of(data.decode("utf-8-sig").strip() if cls else strict_json.parse(bytes(data))["label"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = str(error) if isinstance(error, LabelError) else repr(error)
        raise BadInputError(f"{file}: the label of '{readable(name)}' can't be read ({reason})") from error
    digest = content_hash(read_exactly(descriptor, image.offset_data, image.size))
    yield _Sample(name, text, image.offset_data, image.size, digest)


def _incomplete(file: Path, group: _Group, image: tarfile.TarInfo | None) -> Iterator[LeftOut]:
    """Yields the members of an incomplete sample, with the reason."""
    for suffix, member in group.items():
        reason = f".{suffix}" if suffix else "file{s} without a suffix"
        if member is image:
            reason = "sample{s} without a label"
        elif image is None and suffix in _LABELS:
            reason = "sample{s} without an image"
        yield one(reason, f"{file.name}: '{member.name}'")
