"""Index of a local set: facts of its samples as columns, listed once; and the hash of each sample's content.

FOLDER/<key>.index      an index, named by what it was made from
FOLDER/<mark>.hashes    64 bits for each sample of the set with this fingerprint, 0 while none is known

FOLDER is data.index, or one in the user's cache. Processes and hosts may share it, and it may go at any time.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from trainer.config.data import at_home
from trainer.data.left_out import LeftOut
from trainer.data.shared import name_columns
from trainer.errors import first_line
from trainer.host import strict_json
from trainer.host.files import cache_folder, written_whole
from trainer.observe.console import say

_LAYOUT = 1  # raised where the same set gives another index
_WIDE = 8  # bytes of a hash
_files = dict[Path, int]()  # open files of hashes


class Index(NamedTuple):
    """List of a set's samples: what each format makes, and readers read from.

    Attributes:
        columns: A row for each sample: `label`, its class; `name` and `name_end`, its path or member, see
            `name_columns`; what else its reader needs.
        classes: Class names.
        left_out: Files and samples that aren't read.
        facts: Further facts of the set, as JSON holds them.
        more: Further arrays, which have other lengths.
    """

    columns: Mapping[str, npt.NDArray[Any]]
    classes: Sequence[str]
    left_out: Sequence[LeftOut] = ()
    facts: Mapping[str, Any] = {}
    more: Mapping[str, npt.NDArray[Any]] = {}


def index_of(
    names: list[bytes],
    labels: Sequence[int] | npt.NDArray[np.int64],
    classes: Sequence[str],
    left_out: Sequence[LeftOut] = (),
    **columns: npt.NDArray[Any],
) -> Index:
    """Returns the index of samples that have a name and a class."""
    return Index({**name_columns(names), "label": np.asarray(labels, np.int64), **columns}, classes, left_out)


def index_folder(index: Path | None) -> Path:
    """Returns data.index, by default a folder in the user's cache."""
    return cache_folder("index") if index is None else at_home(index, "data.index")


def kept(
    folder: Path | None,
    made_from: Sequence[object],
    make: Callable[[], Index],
    fewest: int = 0,
    anew: bool = False,
) -> Index:
    """Returns an index from a folder; makes it, and keeps it there, if there is none.

    Args:
        folder: The folder; None: nothing is kept.
        made_from: All that the index depends on, as JSON holds it.
        make: Makes the index.
        fewest: Samples from which on it is kept: a short list is made in no time.
        anew: True to make it even if it is there.
    """
    if folder is None:
        return make()
    key = hashlib.sha256(json.dumps([_LAYOUT, *made_from]).encode()).hexdigest()[:32]
    file = folder / f"{key}.index"
    index = None if anew else _read(file)
    if index is None:
        index = make()
        if len(index.columns["label"]) >= fewest:
            _write(file, index)
    return index


def _read(file: Path) -> Index | None:
    try:
        with safe_open(file, framework="numpy") as opened:
            about = strict_json.parse((opened.metadata() or {})["about"].encode())
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  (no mapping)
        if about["sha256"] != _hash(arrays):
            raise ValueError("another hash")
        left_out = [LeftOut.model_validate(one) for one in about["left_out"]]
        more = {name: arrays.pop(f"more.{name}") for name in about["more"]}
        return Index(arrays, about["classes"], left_out, about["facts"], more)
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        say(f"{file}: can't be read ({first_line(error)}), so the set is listed again")
        return None


def _write(file: Path, index: Index) -> None:
    arrays = {**index.columns, **{f"more.{name}": array for name, array in index.more.items()}}
    about = {
        "sha256": _hash(arrays),
        "classes": list(index.classes),
        "left_out": [one.model_dump() for one in index.left_out],
        "facts": index.facts,
        "more": list(index.more),
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(file, lasting=False) as beside:
            safetensors.numpy.save_file(arrays, beside, {"about": json.dumps(about)})
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        say(f"{file}: can't be written ({reason}), so each process lists the set for itself")


def _hash(arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape};".encode() + array.tobytes())
    return digest.hexdigest()


def content_hash(data: bytes | bytearray) -> int:
    """Returns the first 64 bits of SHA-256, which detect damage, not forgery."""
    return int.from_bytes(hashlib.sha256(data).digest()[:_WIDE], "little")


def hashes_of(folder: Path, mark: str, samples: int, make: bool) -> Path | None:
    """Returns the file of a set's hashes; None if there is none.

    Args:
        folder: Folder of indexes.
        mark: Fingerprint of the set.
        samples: Number of its samples.
        make: True to make the file, if that can be.
    """
    file = folder / f"{mark.replace(' ', '-')}.hashes"
    with contextlib.suppress(OSError):
        if make and not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("ab") as opened:
                opened.truncate(samples * _WIDE)
        return file if file.stat().st_size == samples * _WIDE else None
    return None


def known_hashes(file: Path) -> int:
    """Returns the number of samples whose hash is known."""
    return int(np.count_nonzero(np.fromfile(file, np.uint64)))


def is_as_before(file: Path, sample: int, data: bytes | bytearray) -> bool:
    """Compares the content of a sample with its hash in a file, or writes the hash if none is known.

    A file that can't be read or written knows none.
    """
    own = content_hash(data) or 1
    with contextlib.suppress(OSError):
        opened = _opened(file)
        if known := int.from_bytes(os.pread(opened, _WIDE, sample * _WIDE), "little"):
            return known == own
        os.pwrite(opened, own.to_bytes(_WIDE, "little"), sample * _WIDE)
    return True


def _opened(file: Path) -> int:
    """Opens a file of hashes, once in a process, and again if it was removed."""
    if file in _files and not os.fstat(_files[file]).st_nlink:
        os.close(_files.pop(file))
    if file not in _files:
        try:
            _files[file] = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            _files[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    return _files[file]
