"""Stored samples with labels, read at random: what folders, tables, shards and packs have in common."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trainer.rng import Ints


class Records(Protocol):
    """Samples as they are stored.

    Attributes:
        raw: True where what is stored are pixels: uint8 (height, width, 3).
    """

    raw: bool

    @property
    def classes(self) -> Sequence[str]:
        """Names of the classes."""
        ...

    @property
    def labels(self) -> Ints:
        """The class of each sample: int64 (n,)."""
        ...

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def fingerprint(self) -> str:
        """See `Dataset.fingerprint`."""
        ...

    def absent(self) -> str:
        """Which of its files can't be read: how many, and the first; "" if all are there."""
        ...

    def name(self, sample: int) -> str:
        """Where a sample lies, for people."""
        ...

    def file_name(self, sample: int) -> bytes:
        """The name of a sample below its root, the same in each format that it is brought to."""
        ...

    def read(self, sample: int) -> bytearray:
        """Bytes of a sample.

        Raises:
            BadInputError: If they can't be read.
        """
        ...

    def shape(self, sample: int) -> tuple[int, int]:
        """Height and width where pixels are stored; (0, 0) for one that is stored as the file it was."""
        ...

    def rows(self, sample: int, top: int, height: int) -> npt.NDArray[np.uint8]:
        """Some rows of stored pixels: (height, width, 3).

        Raises:
            BadInputError: If they can't be read.
        """
        ...
