"""Interface of stored samples with labels: folders, tables, shards and packs."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from trainer.config.data import DataConfig, OnCorrupt
from trainer.data.corrupt import Bad, fill_rows
from trainer.data.dataset import Arrays, Field
from trainer.data.formats.index import Index, hashes_of, index_folder, is_as_before
from trainer.data.left_out import LeftOut, tally
from trainer.data.shared import Columns, name_at
from trainer.errors import BadInputError
from trainer.observe.console import say
from trainer.rng import Ints

LABEL, ROW = "label", "row"


def is_upright(config: DataConfig, auto: bool | None = None) -> bool:
    """Returns data.exif_orientation as a bool; `auto` is the data's own default."""
    auto = config.name == "hf" if auto is None else auto
    return auto if config.exif_orientation == "auto" else config.exif_orientation == "apply"


class Records(ABC):
    """Stored samples; facts about each are rows of columns in shared memory.

    Attributes:
        raw: True if pixels are stored: uint8 (height, width, 3).
        classes: Class names.
        left_out: Files that aren't read, by reason.
        upright: True to apply the EXIF orientation.
        sets: Where a sample may have several classes: uint8 (sets, classes), 1 for each class of a set; a
            label is then the number of a set.
    """

    raw = False
    sets: npt.NDArray[np.uint8] | None = None
    left_out: tuple[LeftOut, ...] = ()
    upright = False
    classes: Sequence[str]
    _columns: Columns
    _hashes: Path | None = None

    def __init__(self, index: Index) -> None:
        """Takes the list of the samples."""
        self.classes, self.left_out = tuple(index.classes), tally(index.left_out)
        self._columns, self.sets = Columns.hold(index.columns), index.more.get("sets")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def labels(self) -> Ints:
        """Class of each sample: int64 (n,)."""
        labels: Ints = self._columns["label"]
        return labels

    def only(self, samples: Ints) -> Self:
        """Returns the subset of some samples, renumbered in this order."""
        part = copy.copy(self)
        part._columns = Columns.hold(self._columns.rows(samples))
        return part

    def numbered_by(self, classes: Sequence[str]) -> Self:
        """Returns the same samples with the class numbers of other data; their own classes are among them."""
        number, part = {name: index for index, name in enumerate(classes)}, copy.copy(self)
        if self.sets is not None:
            part.classes, part.sets = classes, np.zeros((len(self.sets), len(classes)), np.uint8)
            part.sets[:, [number[name] for name in self.classes]] = self.sets
            return part
        if tuple(self.classes) == tuple(classes[: len(self.classes)]):
            return self
        numbers = np.array([number.get(name, -1) for name in self.classes], np.int64)
        part.classes, part._columns = classes, self._columns.replaced(LABEL, numbers[self.labels])
        return part

    def counts(self) -> Ints:
        """Returns the number of samples of each class: int64 (classes,)."""
        of_labels = np.bincount(self.labels, minlength=len(self.classes if self.sets is None else self.sets))
        counts: Ints = of_labels if self.sets is None else of_labels @ self.sets.astype(np.int64)
        return counts

    def keep_hashes(self, index: Path | None, make: bool = False) -> Path | None:
        """Compares the content of samples, as they are read, with hashes in a file, and adds unknown ones.

        Args:
            index: data.index; None: the folder in the user's cache.
            make: True to make the file; else it is used if it is there, or if `index` is given.

        Returns:
            The file, or None.
        """
        folder, make = index_folder(index), make or index is not None
        if make or any(folder.glob(f"{len(self)}-*.hashes")):
            self._hashes = hashes_of(folder, self.fingerprint(), len(self), make)
            if make and self._hashes is None:
                say(f"{folder}: no hashes can be kept there, so samples aren't compared with earlier ones")
        if self._hashes is not None and ROW not in self._columns:
            self._columns = self._columns.replaced(ROW, np.arange(len(self)))
        return self._hashes

    def _as_before(self, sample: int, data: bytearray) -> bytearray:
        """Returns the content of a sample.

        Raises:
            BadInputError: If it isn't what it was when its hash was kept.
        """
        if self._hashes is not None and not is_as_before(self._hashes, self._row(sample), data):
            raise BadInputError(
                f"{self.name(sample)}: has changed since it was first read; bring it back, or remove "
                f"{self._hashes} if that is meant"
            )
        return data

    def _row(self, sample: int) -> int:
        """Returns the number of a sample in the whole set."""
        return int(self._columns[ROW][sample])

    def contents(self) -> npt.NDArray[Any] | None:
        """Returns a number for each sample, (n,), equal for the same file or content; None if unknown."""
        return None

    def file_name(self, sample: int) -> bytes:
        """Returns the path of a sample relative to its root, which a pack keeps."""
        return name_at(self._columns, sample)

    def shape(self, sample: int) -> tuple[int, int]:  # noqa: ARG002
        """Returns height and width if pixels are stored; (0, 0) for a sample stored as a file."""
        return (0, 0)

    def rows(self, sample: int, top: int, height: int) -> npt.NDArray[np.uint8]:
        """Reads some rows of stored pixels: uint8 (height, width, 3).

        Raises:
            BadInputError: If they can't be read.
        """
        raise NotImplementedError

    @abstractmethod
    def fingerprint(self) -> str:
        """See `Dataset.fingerprint`."""

    @abstractmethod
    def absent(self) -> str:
        """Returns a line with the number of unreadable files and the first one; "" if there are none."""

    @abstractmethod
    def name(self, sample: int) -> str:
        """Returns the path of a sample, for people."""

    @abstractmethod
    def read(self, sample: int) -> bytearray:
        """Reads the bytes of a sample.

        Raises:
            BadInputError: If they can't be read.
        """


class RecordsDataset:
    """Base class of data sets of records, which loader workers read.

    The field label is int64 (), or where a sample may have several classes uint8 (classes,).
    """

    num_items = 1
    arrays: Arrays | None = None
    in_process = False

    def __init__(self, records: Records, fields: Mapping[str, Field], on_corrupt: OnCorrupt) -> None:
        self.records, self._on_corrupt = records, on_corrupt
        self.fields: Mapping[str, Field] = {**fields, LABEL: _label_field(records)}

    def number_by(self, classes: Sequence[str]) -> None:
        """Numbers the classes as a model does, see `Records.numbered_by`."""
        self.records = self.records.numbered_by(classes)
        self.fields = {**self.fields, LABEL: _label_field(self.records)}

    def __len__(self) -> int:
        return len(self.records)

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """Files that aren't read, by reason."""
        return self.records.left_out

    @property
    def labels(self) -> Ints:
        """Class of each sample: int64 (n,)."""
        return self.records.labels

    def only(self, samples: Ints) -> Self:
        """See `Records.only`."""
        part = copy.copy(self)
        part.records = self.records.only(samples)
        return part

    def fingerprint(self) -> str:
        """Returns the fingerprint of the records, and whether they are made upright."""
        return f"{self.records.fingerprint()}{' upright' * self.records.upright}"

    def _filled(self, samples: Ints, fill: Callable[[int, int], None], out: Arrays) -> list[Bad]:
        """Fills the rows of a batch with samples and their labels; see `fill_rows`."""
        label, stored, sets = out[LABEL], self.records.labels, self.records.sets

        def both(row: int, sample: int) -> None:
            fill(row, sample)
            label[row] = stored[sample] if sets is None else sets[stored[sample]]

        return fill_rows(samples, both, self.records.name, self._on_corrupt, len(self))


def _label_field(records: Records) -> Field:
    if records.sets is None:
        return Field((), np.dtype(np.int64))
    return Field((records.sets.shape[1],), records.sets.dtype)
