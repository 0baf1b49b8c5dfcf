"""Samples in a few large files with an index: tar shards and packs.

FOLDER/index.json           classes, shards with size and SHA-256, source
FOLDER/index.safetensors    per sample: shard, offset, size, label, hash, name; for pixels the shape
FOLDER/<shard> …            original .tar files, or .bin files of concatenated samples
"""

import copy
import hashlib
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import Self

from trainer.checkpoint.tensor_file import safetensors_bytes
from trainer.config.data import DataConfig
from trainer.config.section import first_problem
from trainer.data.check import Wrong, unreadable_line
from trainer.data.corrupt import Corrupt
from trainer.data.formats.files import LARGEST_FILE, fill_exactly, hint, open_sample_file, readable, unlisted
from trainer.data.formats.index import Index, content_hash
from trainer.data.formats.records import Records
from trainer.data.left_out import LeftOut
from trainer.data.shared import Columns
from trainer.errors import BadInputError
from trainer.host import files as disk, strict_json
from trainer.rng import Ints

INDEX, COLUMNS = "index.json", "index.safetensors"

COMPRESSED = (".gz", ".tgz", ".bz2", ".tbz", ".tbz2", ".xz", ".txz", ".zst", ".tzst", ".lz4", ".lzma", ".z")
PACKED, TAR_SHARDS = "compressed shard{s}", "tar shards"

_OPEN_FILES = 512  # per process; the limit is often 1024


class Shard(BaseModel):
    """Entry of a shard in index.json."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: str = Field(pattern=r"^[^/\x00]+$")
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class About(BaseModel):
    """The content of index.json."""

    model_config = ConfigDict(extra="forbid", strict=True)
    format: Literal["trainer-shards-1"] = "trainer-shards-1"
    stored: Literal["files", "pixels"]
    classes: list[str]
    samples: int = Field(ge=1)
    shards: list[Shard]
    columns_sha256: str
    source: str
    settings: dict[str, Any]
    left_out: list[LeftOut] = Field(default_factory=list)


class ShardStore(Protocol):
    """Storage of shards."""

    def open(self, shard: Shard) -> int:
        """Opens a shard for reading and returns its descriptor.

        Raises:
            OSError: If it can't be opened.
            BadInputError: If it can't be opened, with a reason of the store.
        """


class ShardFolder:
    """Shards in a folder of this machine."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, shard: Shard) -> int:
        """See `ShardStore.open`."""
        return open_sample_file(self.path / shard.name)[0]

    def __str__(self) -> str:
        return readable(os.fsencode(self.path))


class ShardedRecords(Records):
    """Samples of an index, read from shards of a folder or a cache."""

    def __init__(self, about: About, columns: Columns, store: ShardStore) -> None:
        self.about, self.raw = about, about.stored == "pixels"
        self.upright = bool(about.settings.get("reading", {}).get("upright"))
        self.classes: Sequence[str] = tuple(about.classes)
        self._columns, self._store = columns, store
        self.left_out = tuple(about.left_out)
        self._files = OrderedDict[int, int]()

    @property
    def decoded(self) -> bool:
        """True for a pack of images that were decoded, and encoded again or stored as pixels."""
        return self.raw or self.about.settings.get("short_side") is not None

    @property
    def sizes(self) -> list[int]:
        """Samples in each shard."""
        counts = np.bincount(self._columns["shard"], minlength=len(self.about.shards))
        return [int(count) for count in counts]

    def only(self, samples: Ints) -> Self:
        """See `Records.only`; keeps the shards that hold these samples."""
        part, columns = copy.copy(self), self._columns.rows(samples)
        used, shard = np.unique(columns["shard"], return_inverse=True)
        digest = hashlib.sha256(self.about.columns_sha256.encode() + samples.tobytes()).hexdigest()
        shards = [self.about.shards[number] for number in used.tolist()]
        changes = {"samples": len(samples), "shards": shards, "columns_sha256": digest}
        part.about = self.about.model_copy(update=changes)
        part._columns = Columns.hold({**columns, "shard": shard.astype(np.int32)})
        return part

    def contents(self) -> npt.NDArray[Any]:
        """See `Records.contents`: by the hash of each sample."""
        return self._columns["hash"]

    def fingerprint(self) -> str:
        """Returns the sample count and a hash of the index, which has a hash of every sample."""
        identity = f"{self.about.columns_sha256} {self.about.classes} {self.about.stored}"
        return f"{len(self)} samples {hashlib.sha256(identity.encode()).hexdigest()[:16]}"

    def absent(self) -> str:
        """See `Records.absent`."""
        wrong = []
        for number, shard in enumerate(self.about.shards):
            try:
                os.close(self._opened(shard))
            except OSError as error:
                more = hint(os.fsencode(str(self._store)), os.fsencode(shard.name))
                wrong.append(Wrong(number, f"{error.strerror or error}{more}"))
        return unreadable_line(
            wrong,
            len(self.about.shards),
            f"shards of {self._store}",
            lambda number: f"{self._store}/{self.about.shards[number].name}",
            "copy them again, or make the pack or index again",
        )

    def name(self, sample: int) -> str:
        """Returns the path of the shard and the sample's name in it."""
        shard = self.about.shards[int(self._columns["shard"][sample])].name
        return f"{self._store}/{shard}: {readable(self.file_name(sample))}"

    def shape(self, sample: int) -> tuple[int, int]:
        """See `Records.shape`."""
        if not self.raw:
            return (0, 0)
        return int(self._columns["height"][sample]), int(self._columns["width"][sample])

    def read(self, sample: int) -> bytearray:
        """See `Records.read`.

        Raises:
            Corrupt: If the bytes differ from those that were indexed: the label may not be theirs.
        """
        size = int(self._columns["bytes"][sample])
        if not 0 <= size <= LARGEST_FILE:
            raise BadInputError(f"{self.name(sample)}: can't have {size:,} bytes; make the index again")
        data = bytearray(size)
        self._fill(sample, 0, memoryview(data))
        if content_hash(data) != int(self._columns["hash"][sample]):
            raise Corrupt("has changed since it was indexed: bring it back, or make the index or pack again")
        return data

    def is_whole(self, sample: int) -> bool:
        """True if a sample is what it was when it was indexed."""
        try:
            self.read(sample)
        except (BadInputError, Corrupt):
            return False
        return True

    def rows(self, sample: int, top: int, height: int) -> npt.NDArray[np.uint8]:
        """See `Records.rows`."""
        pixels = np.empty((height, int(self._columns["width"][sample]), 3), np.uint8)
        self._fill(sample, top * pixels.strides[0], pixels.data.cast("B"))
        return pixels

    def _fill(self, sample: int, start: int, view: memoryview) -> None:
        # pread instead of a mapping: truncating a mapped file ends the process (SIGBUS).
        try:
            file = self._file(int(self._columns["shard"][sample]))
            fill_exactly(file, int(self._columns["offset"][sample]) + start, view)
        except OSError as error:
            raise BadInputError(
                f"{self.name(sample)}: can't be read ({error.strerror or error}); was it moved or changed?"
            ) from error

    def _file(self, number: int) -> int:
        if number in self._files:
            self._files.move_to_end(number)
            return self._files[number]
        self._files[number] = file = self._opened(self.about.shards[number])
        if len(self._files) > _OPEN_FILES:
            os.close(self._files.popitem(last=False)[1])
        return file

    def _opened(self, shard: Shard) -> int:
        file = self._store.open(shard)
        if (size := os.fstat(file).st_size) != shard.bytes:
            os.close(file)
            raise OSError(0, f"has {size:,} bytes and not {shard.bytes:,} as when it was indexed")
        return file

    def __getstate__(self) -> dict[str, Any]:
        """Drops open files: a loader worker opens its own."""
        return {**self.__dict__, "_files": OrderedDict()}

    def __del__(self) -> None:
        for file in getattr(self, "_files", {}).values():
            os.close(file)


def read_index(folder: Path) -> tuple[About, Columns]:
    """Reads an index and checks that it is consistent.

    Raises:
        BadInputError: If there is no index, or it is damaged.
    """
    file = folder / INDEX
    try:
        about = About.model_validate(strict_json.parse(file.read_bytes()))
        data = (folder / COLUMNS).read_bytes()
        digest, columns = hashlib.sha256(data).hexdigest(), Columns.copy(data)
    except FileNotFoundError as error:
        raise BadInputError(
            f"{folder}: no {error.filename and Path(error.filename).name}; make it with `trainer data pack` "
            "or, for tar shards, `trainer data index`"
        ) from error
    except OSError as error:
        raise BadInputError(f"{folder}: the index can't be read ({error.strerror})") from error
    except ValidationError as error:
        raise BadInputError(f"{file}: {first_problem(error)}; make the index again") from error
    except ValueError as error:
        raise BadInputError(f"{folder}: the index is damaged: {error}; make it again") from error
    if digest != about.columns_sha256:
        raise BadInputError(f"{folder / COLUMNS}: doesn't belong to {INDEX} beside it; make the index again")
    _check(folder, about, columns)
    return about, columns


def _check(folder: Path, about: About, columns: Columns) -> None:
    wanted = {"shard": np.int32, "offset": np.int64, "bytes": np.int64, "label": np.int64, "hash": np.uint64}
    wanted["name_end"] = np.int64
    if about.stored == "pixels":
        wanted |= {"height": np.int32, "width": np.int32}
    for name, dtype in wanted.items():
        if name not in columns or columns[name].dtype != dtype or columns[name].shape != (about.samples,):
            raise BadInputError(f"{folder / COLUMNS}: column '{name}' isn't what it should be; make it again")
    lowest = min(int(columns[name].min()) for name in ("shard", "offset", "bytes", "label"))
    ends = columns["offset"] + columns["bytes"]
    sizes = np.array([shard.bytes for shard in about.shards])
    if (
        lowest < 0
        or int(columns["shard"].max()) >= len(about.shards)
        or int(columns["label"].max()) >= len(about.classes)
        or bool((ends > sizes[columns["shard"]]).any())
    ):
        raise BadInputError(f"{folder / COLUMNS}: points outside the shards or classes; make it again")


def about_of(index: Index, stored: Literal["files", "pixels"], source: str, **settings: Any) -> About:
    """Describes an index of shards, which its facts name."""
    digest = hashlib.sha256()
    for part in _bytes_of(index):
        digest.update(part)
    return About(
        stored=stored,
        classes=list(index.classes),
        samples=len(index.columns["label"]),
        shards=[Shard.model_validate(shard) for shard in index.facts["shards"]],
        columns_sha256=digest.hexdigest(),
        source=source,
        settings=settings,
        left_out=list(index.left_out),
    )


def _bytes_of(index: Index) -> Iterator[bytes | memoryview]:
    return safetensors_bytes({name: torch.from_numpy(array) for name, array in index.columns.items()})


def write_index(folder: Path, index: Index, about: About) -> About:
    """Writes an index of shards; index.json is written last and marks it complete."""
    for name in (INDEX, COLUMNS):
        disk.remove(folder / f".{name}")
    disk.remove(folder / INDEX)
    disk.write_file(folder / f".{COLUMNS}", _bytes_of(index))
    disk.write_file(folder / f".{INDEX}", [about.model_dump_json(indent=1).encode()])
    disk.rename(folder / f".{COLUMNS}", folder / COLUMNS)
    disk.rename(folder / f".{INDEX}", folder / INDEX)
    disk.sync_folder(folder)
    return about


def sharded_split(config: DataConfig, path: Path, split: str) -> ShardedRecords:  # noqa: ARG001
    """Opens `path/split`, see `in_shards`."""
    return in_shards(path / split)


def in_shards(folder: Path) -> ShardedRecords:
    """Opens shards or a pack on this machine.

    Raises:
        BadInputError: If there is no valid index.
    """
    about, columns = read_index(folder)
    records = ShardedRecords(about, columns, ShardFolder(folder))
    names = [shard.name for shard in about.shards]
    suffixes = {os.path.splitext(name)[1].lower() for name in names} - {""}  # noqa: PTH122
    left_out = about.left_out
    if about.source == TAR_SHARDS:  # compressed ones are those that lie there now
        left_out = [each for each in left_out if each.reason != PACKED]
        left_out += unlisted(PACKED, folder, COMPRESSED, deep=False)
    added = unlisted(f"shard{{s}} that {INDEX} doesn't name", folder, [*suffixes], names, deep=False)
    records.left_out = (*left_out, *added)
    return records
