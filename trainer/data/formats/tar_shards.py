"""Tar shards in WebDataset's layout, indexed once and then read at random.

A sample is what shares a name up to its first dot: `0001.jpg` with `0001.cls` (a label as text) or
`0001.json` (with a key "label"). See https://github.com/webdataset/webdataset.
"""

import hashlib
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from trainer.data.formats.files import IMAGES, read_exactly, readable
from trainer.data.formats.labels import LabelError, label_of, numbered
from trainer.data.formats.sharded import About, Shard, hash_of, write_index
from trainer.data.shared import joined
from trainer.errors import BadInputError

_CHUNK = 1 << 20
_LARGEST_LABEL = 1 << 20


class _Sample(NamedTuple):
    name: bytes
    label: str
    offset: int
    size: int
    digest: int


def index_shards(folder: Path, advance: Callable[[int], object] = lambda _: None) -> About:
    """Reads every tar file of a folder and writes an index beside them.

    Args:
        folder: Holds plain .tar files.
        advance: Told of bytes that have been read.

    Raises:
        BadInputError: If there are none, or one isn't what it should be.
    """
    files = sorted(folder.glob("*.tar")) if folder.is_dir() else []
    if not files:
        compressed = sorted(folder.glob("*.tar.*")) + sorted(folder.glob("*.tgz")) if folder.is_dir() else []
        if compressed:
            raise BadInputError(f"{compressed[0]}: compressed tar can't be read at random; unpack it to .tar")
        raise BadInputError(f"{folder}: no .tar files here")
    shards, samples, numbers = [], list[_Sample](), list[int]()
    for number, file in enumerate(files):
        try:
            found = list(_samples(file))
            shards.append(Shard(name=file.name, bytes=file.stat().st_size, sha256=_sha256(file, advance)))
        except ValidationError as error:
            raise BadInputError(
                f"{readable(os.fsencode(file))}: an index can't hold this name; rename the shard"
            ) from error
        except OSError as error:
            raise BadInputError(f"{file}: can't be read ({error.strerror or error})") from error
        samples += found
        numbers += [number] * len(found)
    if not samples:
        raise BadInputError(f"{folder}: its tar files hold no sample with an image and a label (.cls, .json)")
    try:
        labels, classes = numbered([sample.label for sample in samples])
    except LabelError as error:
        where = f"{folder / files[numbers[error.at]].name}: '{readable(samples[error.at].name)}'"
        raise BadInputError(f"{where}: {error}; write both alike") from error
    columns: dict[str, npt.NDArray[Any]] = {
        "shard": np.array(numbers, np.int32),
        "offset": np.array([sample.offset for sample in samples], np.int64),
        "bytes": np.array([sample.size for sample in samples], np.int64),
        "label": np.array(labels, np.int64),
        "hash": np.array([sample.digest for sample in samples], np.uint64),
        **joined([sample.name for sample in samples]),
    }
    return write_index(folder, shards, columns, classes, "files", "tar shards", {})


def _samples(file: Path) -> Iterator[_Sample]:
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        group: dict[str, tarfile.TarInfo] = {}
        key = ""
        for member in _members(file):
            folder, _, base = member.name.rpartition("/")
            stem, _, suffix = base.partition(".")
            if (mine := f"{folder}/{stem}") != key:
                yield from _sample(file, descriptor, group)
                group, key = {}, mine
            group[suffix.lower()] = member
        yield from _sample(file, descriptor, group)
    finally:
        os.close(descriptor)


def _members(file: Path) -> Iterator[tarfile.TarInfo]:
    try:
        with tarfile.open(file, "r:", encoding="utf-8", errors="surrogateescape") as tar:
            for member in tar:
                if member.name.startswith("/") or ".." in member.name.split("/"):
                    name = readable(os.fsencode(member.name))
                    raise BadInputError(f"{file}: '{name}' leads out of the archive; make the shard again")
                if member.islnk() or member.issym():
                    name = readable(os.fsencode(member.name))
                    raise BadInputError(
                        f"{file}: '{name}' is a link; make the shard with --dereference --hard-dereference"
                    )
                if member.isfile() and not member.issparse():
                    yield member
    except tarfile.TarError as error:
        raise BadInputError(f"{file}: not a readable tar file ({error})") from error


def _sample(file: Path, descriptor: int, group: dict[str, tarfile.TarInfo]) -> Iterator[_Sample]:
    image = next((member for suffix, member in group.items() if f".{suffix}" in IMAGES), None)
    if image is None:
        return
    name = os.fsencode(image.name)
    label = group.get("cls") or group.get("json")
    if label is None or label.size > _LARGEST_LABEL:
        raise BadInputError(f"{file}: '{readable(name)}' has no label (.cls or .json beside it)")
    data = read_exactly(descriptor, label.offset_data, label.size)
    try:
        text = label_of(data.decode("utf-8-sig").strip() if "cls" in group else json.loads(data)["label"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = str(error) if isinstance(error, LabelError) else repr(error)
        raise BadInputError(f"{file}: the label of '{readable(name)}' can't be read ({reason})") from error
    digest = hash_of(read_exactly(descriptor, image.offset_data, image.size))
    yield _Sample(name, text, image.offset_data, image.size, digest)


def _sha256(file: Path, advance: Callable[[int], object]) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()
