"""Interface of a data set, and two implementations: arrays in memory."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from trainer.data.corrupt import Bad
from trainer.data.left_out import LeftOut
from trainer.rng import Float32, Ints

Arrays = Mapping[str, npt.NDArray[np.generic]]

NUM_ITEMS = "num_items"
LENGTH = "length"

_HASHED_BYTES = 16 << 20  # of each field: 10 ms


_KINDS = "biuf"
_WIDEST_BYTES = 8  # of a float: longdouble has more


class Field(NamedTuple):
    """Shape and dtype of one sample's part of a batch."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]


class Dataset(Protocol):
    """Samples that can be read at random.

    Attributes:
        fields: What a sample consists of. A field named "num_items" (int64, shape ()) says how many items
            the loss of the sample is a sum over, where that differs between samples (valid tokens). One
            named "length" (int64, shape ()) says how many of its places are in use, where that is more.
        num_items: Items of a sample, or their upper bound where there is a "num_items" field.
        uniforms: Random numbers that `read` wants for each sample in training.
        arrays: The whole data set, (samples, *shape) for each field, where it is held in memory; it may
            then live on the device.
        in_process: True where a batch costs less than handing it over between processes: read it where it
            is used, without workers.

    A data set may have `buckets`, the number of samples in each of its buckets of similar length, whose
    samples have consecutive numbers: then those of a micro-batch are of one bucket. It may have `records`,
    which are looked up before ranks start (`formats.records`), `labels`, the class of each sample, by which
    `data.class_weights` draws, and `only(samples)`, which gives the data set of some of its samples.
    """

    fields: Mapping[str, Field]
    num_items: int
    uniforms: int
    arrays: Arrays | None
    in_process: bool

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def fingerprint(self) -> str:
        """Number of samples and a hash: other words for other data, whatever host and folder it lies in."""
        ...

    def read(self, samples: Ints, random: Float32 | None, out: Arrays) -> Sequence[Bad] | None:
        """Writes samples into a batch, all at once.

        Args:
            samples: int64 (micro_batch_size,).
            random: float32 (micro_batch_size, at least `uniforms`) in [0, 1), keyed by sample and epoch;
                None in evaluation.
            out: For each field an array (micro_batch_size, *shape) to be filled.

        Returns:
            The corrupt samples that others stand in for (see `corrupt.fill_rows`), if there were any.
        """
        ...


class ArrayDataset:
    """A data set that is held in memory."""

    def __init__(self, arrays: Arrays) -> None:
        """Takes over arrays of shape (samples, *shape), without a copy."""
        self.arrays: Arrays | None = arrays
        self._arrays = arrays
        self.uniforms = 0
        self.in_process = True
        self.buckets: tuple[int, ...] = ()
        self.left_out: tuple[LeftOut, ...] = ()
        self.num_items = max(1, int(arrays[NUM_ITEMS].max())) if NUM_ITEMS in arrays else 1
        self.fields: Mapping[str, Field] = {n: Field(a.shape[1:], a.dtype) for n, a in arrays.items()}

    def __len__(self) -> int:
        """Number of samples."""
        return len(next(iter(self._arrays.values())))

    @property
    def labels(self) -> npt.NDArray[np.generic] | None:
        """The field label, where that is one number for each sample."""
        label = self._arrays.get("label")
        return label if label is not None and label.ndim == 1 else None

    def fingerprint(self) -> str:
        """Fingerprint of all rows, or of evenly spaced ones if they are many; see `Dataset.fingerprint`."""
        digest = hashlib.sha256()
        for name, array in sorted(self._arrays.items()):
            digest.update(f"{name} {array.dtype} {array.shape};".encode())
            budget = max(1, _HASHED_BYTES * len(array) // max(1, array.nbytes))
            digest.update(np.ascontiguousarray(array[spread(len(array), budget)]).tobytes())
        return f"{len(self)} samples {digest.hexdigest()[:16]}"

    def read(self, samples: Ints, random: Float32 | None, out: Arrays) -> None:  # noqa: ARG002
        """Copies rows; see `Dataset.read`."""
        for name, array in self._arrays.items():
            np.take(array, samples, axis=0, out=out[name], mode="clip")


def as_numbers(name: str, value: Any) -> npt.NDArray[Any]:
    """Returns a field as a contiguous array in the machine's byte order, of numbers that torch has types for.

    Raises:
        ValueError: If it isn't one; the message begins with the field's name.
    """
    if np.ma.is_masked(value):
        raise ValueError(
            f"'{name}' as a masked array, and torch has no masks: fill it (.filled(0), say), and give the "
            "mask as a field of its own"
        )
    try:
        array = np.ascontiguousarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"'{name}' as a {type(value).__name__} that numpy can't read ({error})") from error
    if array.dtype.kind not in _KINDS:
        raise ValueError(f"'{name}' of dtype {array.dtype}, which is no number")
    if array.dtype.kind == "f" and array.dtype.itemsize > _WIDEST_BYTES:
        raise ValueError(
            f"'{name}' of dtype {array.dtype}, which torch doesn't have: give float64 or float32"
        )
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def spread(count: int, budget: int) -> Ints:
    """Indices of all of `count` things, or of `budget` of them from the first to the last: int64 (n,)."""
    return np.linspace(0, count - 1, min(count, budget)).astype(np.int64)
