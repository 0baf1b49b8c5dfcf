"""Interface of a data set, and the implementations for arrays in memory and for some samples of another."""

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
LENGTH = "\0length"  # of our own data; a user's field may be called "length"

_HASHED_BYTES = 16 << 20  # of each field: 10 ms
_KINDS = "biuf"
_WIDEST_BYTES = 8  # of a float: longdouble has more


class Field(NamedTuple):
    """Shape and dtype of a field of one sample."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]


class Dataset(Protocol):
    """Samples that can be read at random.

    Attributes:
        fields: Fields of a sample. "num_items" (int64, shape ()) is the number of items that the sample's
            loss is a sum over (valid tokens), if it differs between samples.
        num_items: Items of a sample, or their upper bound if there is a field "num_items".
        uniforms: Random numbers per sample that `read` takes in training.
        arrays: All samples, (samples, *shape) for each field, if they are in memory; they may then be kept
            on the device. Else None.
        in_process: True if reading a batch costs less than passing it between processes: no loader workers.

    Optional attributes: `buckets`, the number of samples in each bucket of similar length, with consecutive
    sample numbers (all samples of a micro-batch come from one bucket); `records`, checked before ranks start
    (`formats.records`); `labels`, the class of each sample, for `data.class_weights`; `only(samples)`, which
    returns the data set of some samples.
    """

    fields: Mapping[str, Field]
    num_items: int
    uniforms: int
    arrays: Arrays | None
    in_process: bool

    def __len__(self) -> int:
        """Number of samples."""

    def fingerprint(self) -> str:
        """Sample count and content hash; independent of host and path."""

    def read(self, samples: Ints, random: Float32 | None, out: Arrays) -> Sequence[Bad] | None:
        """Reads samples into a batch.

        Args:
            samples: int64 (micro_batch_size,).
            random: float32 (micro_batch_size, at least `uniforms`) in [0, 1), keyed by sample and epoch;
                None in evaluation.
            out: Array (micro_batch_size, *shape) for each field, to be filled.

        Returns:
            Corrupt samples that were replaced by others (see `corrupt.fill_rows`); None or empty if none.
        """


class ArrayDataset:
    """Data set of arrays in memory."""

    def __init__(self, arrays: Arrays) -> None:
        """Takes arrays (samples, *shape), without a copy."""
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
        """The field "label" if it is one number per sample, else None."""
        label = self._arrays.get("label")
        return label if label is not None and label.ndim == 1 else None

    def fingerprint(self) -> str:
        """Returns the sample count and a hash of all rows, or of evenly spaced ones above 16 MiB."""
        digest = hashlib.sha256()
        for name, array in sorted(self._arrays.items()):
            digest.update(f"{name} {array.dtype} {array.shape};".lstrip("\0").encode())
            budget = max(1, _HASHED_BYTES * len(array) // max(1, array.nbytes))
            digest.update(np.ascontiguousarray(array[spread(len(array), budget)]).tobytes())
        return f"{len(self)} samples {digest.hexdigest()[:16]}"

    def read(self, samples: Ints, random: Float32 | None, out: Arrays) -> None:  # noqa: ARG002
        """Copies rows; see `Dataset.read`."""
        for name, array in self._arrays.items():
            np.take(array, samples, axis=0, out=out[name], mode="clip")


def as_numbers(name: str, value: Any) -> npt.NDArray[Any]:
    """Returns a field as a contiguous array in native byte order, of a dtype that torch has.

    Raises:
        ValueError: If it can't be converted; the message begins with the field's name.
    """
    if np.ma.is_masked(value):
        raise ValueError(
            f"'{name}' as a masked array, and torch has no masks: fill it (.filled(0), say), and give the "
            "mask as a field of its own"
        )
    try:
        array = np.asarray(value, order="C")
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
    """Returns min(count, budget) evenly spaced indices from 0 to count - 1: int64 (n,)."""
    return np.linspace(0, count - 1, min(count, budget)).astype(np.int64)


class LimitedDataset:
    """Subset of a data set that has no `only` of its own; samples are renumbered."""

    def __init__(self, dataset: Dataset, chosen: Ints) -> None:
        self._dataset, self._chosen = dataset, chosen
        self.fields: Mapping[str, Field] = dataset.fields
        self.num_items, self.uniforms = dataset.num_items, dataset.uniforms
        self.in_process = dataset.in_process
        self.arrays: Arrays | None = None
        if dataset.arrays is not None:
            self.arrays = {name: array[chosen] for name, array in dataset.arrays.items()}
        self.left_out = getattr(dataset, "left_out", ())
        self.user_objects = getattr(dataset, "user_objects", ())
        records: Any = getattr(dataset, "records", None)
        self.records = records.only(chosen) if hasattr(records, "only") else records
        ends = np.cumsum([0, *getattr(dataset, "buckets", ())])
        counts = np.diff(np.searchsorted(chosen, ends)).tolist()
        self.buckets = tuple(count for count in counts if count)

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._chosen)

    @property
    def labels(self) -> Any:
        """Labels of the chosen samples, or None."""
        labels = getattr(self._dataset, "labels", None)
        if labels is None or len(labels) != len(self._dataset):  # wrong ones are refused as they are
            return labels
        return np.asarray(labels)[self._chosen]

    def fingerprint(self) -> str:
        """Returns the number of chosen samples and the fingerprint of the full data set."""
        return f"{len(self)} evenly spaced of {self._dataset.fingerprint()}"

    def read(self, samples: Ints, random: Float32 | None, out: Arrays) -> Sequence[Bad]:
        """See `Dataset.read`; reports the corrupt samples that are among those requested."""
        replaced = self._dataset.read(self._chosen[samples], random, out) or ()
        numbers = {int(self._chosen[sample]): int(sample) for sample in samples}
        return [bad._replace(sample=numbers[bad.sample]) for bad in replaced if bad.sample in numbers]


def limited(dataset: Dataset, limit: int | None) -> Dataset:
    """Returns a data set of at most `limit` evenly spaced samples; None: all."""
    if limit is None or len(dataset) <= limit:
        return dataset
    chosen, only = spread(len(dataset), limit), getattr(dataset, "only", None)
    part: Dataset = LimitedDataset(dataset, chosen) if only is None else only(chosen)
    return part
