"""Stored samples with labels, read at random: what folders, tables, shards and packs have in common."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from trainer.config.data import DataConfig, OnCorrupt
from trainer.data.corrupt import Bad, fill_rows
from trainer.data.dataset import Arrays, Field
from trainer.data.left_out import LeftOut
from trainer.data.shared import Columns, name_at
from trainer.rng import Ints

LABEL = "label"


class Reading(NamedTuple):
    """Settings for reading the pixels of an image.

    Attributes:
        upright: Whether the orientation that EXIF says is applied.
        bits: Of those of a 16-bit image, how many are in use; 0: all, and an image that uses 12 at most is
            corrupt.
    """

    upright: bool = False
    bits: int = 0

    def __str__(self) -> str:
        """Suffix for a fingerprint: begins with a blank; "" for the default settings."""
        return " upright" * self.upright + (f" {self.bits} of 16 bits" if self.bits else "")


def reading_of(config: DataConfig, auto: Reading | None = None) -> Reading:
    """Returns the settings by data.exif_orientation and data.image_bits; `auto` is their own default."""
    auto = auto or Reading(config.name == "hf")
    exif, bits = config.exif_orientation, config.image_bits
    return Reading(auto.upright if exif == "auto" else exif == "apply", auto.bits if bits == "auto" else bits)


class Records(ABC):
    """Samples as they are stored, with what is known of each in columns: `only` takes their rows.

    Attributes:
        raw: True where what is stored are pixels: uint8 (height, width, 3).
        classes: Their names.
        left_out: What lies beside the samples and isn't read.
        reading: How the pixels of their images are taken.
    """

    raw = False
    left_out: tuple[LeftOut, ...] = ()
    reading = Reading()
    classes: Sequence[str]
    _columns: Columns

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def labels(self) -> Ints:
        """The class of each sample: int64 (n,)."""
        labels: Ints = self._columns["label"]
        return labels

    def only(self, samples: Ints) -> Self:
        """Some of them, numbered anew in this order."""
        part = copy.copy(self)
        part._columns = Columns.hold(self._columns.rows(samples))
        return part

    def file_name(self, sample: int) -> bytes:
        """The name of a sample below its root, the same in each format that it is brought to."""
        return name_at(self._columns, sample)

    def shape(self, sample: int) -> tuple[int, int]:  # noqa: ARG002
        """Height and width where pixels are stored; (0, 0) for one that is stored as the file it was."""
        return (0, 0)

    def rows(self, sample: int, top: int, height: int) -> npt.NDArray[np.uint8]:
        """Some rows of stored pixels: (height, width, 3).

        Raises:
            BadInputError: If they can't be read.
        """
        raise NotImplementedError

    @abstractmethod
    def fingerprint(self) -> str:
        """See `Dataset.fingerprint`."""

    @abstractmethod
    def absent(self) -> str:
        """Returns how many of its files can't be read, and the first; "" if all can."""

    @abstractmethod
    def name(self, sample: int) -> str:
        """Returns the path of a sample, for people."""

    @abstractmethod
    def read(self, sample: int) -> bytearray:
        """Bytes of a sample.

        Raises:
            BadInputError: If they can't be read.
        """


class RecordsDataset:
    """Base of data sets of records: workers read them, and each has a label, int64 ()."""

    num_items = 1
    arrays: Arrays | None = None
    in_process = False

    def __init__(self, records: Records, fields: Mapping[str, Field], on_corrupt: OnCorrupt) -> None:
        self.records, self._on_corrupt = records, on_corrupt
        self.fields: Mapping[str, Field] = {**fields, LABEL: Field((), np.dtype(np.int64))}

    def __len__(self) -> int:
        return len(self.records)

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """Returns what the records leave out."""
        return self.records.left_out

    @property
    def labels(self) -> Ints:
        """Returns the records' labels."""
        return self.records.labels

    def only(self, samples: Ints) -> Self:
        """See `Records.only`."""
        part = copy.copy(self)
        part.records = self.records.only(samples)
        return part

    def fingerprint(self) -> str:
        """Fingerprint of the records and of the settings for reading pixels."""
        return f"{self.records.fingerprint()}{self.records.reading}"

    def _filled(self, samples: Ints, fill: Callable[[int, int], None], out: Arrays) -> list[Bad]:
        """Fills the rows of a batch with samples and their labels; see `fill_rows`."""
        label, stored = out[LABEL], self.records.labels

        def both(row: int, sample: int) -> None:
            fill(row, sample)
            label[row] = stored[sample]

        return fill_rows(samples, both, self.records.name, self._on_corrupt, len(self))
