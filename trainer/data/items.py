"""Adapter for map-style data sets (`dataset[i]` and `len(dataset)`, as torch.utils.data.Dataset).

torch, numpy.random and random are seeded by (seed, epoch, sample) before each item, in evaluation by the
sample alone: so an item doesn't depend on the number of loader workers or ranks, nor on a resume. The order
of the samples is decided by `sampling.plan`.
"""

import hashlib
import pickle
import random
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainer.data.dataset import NUM_ITEMS, ArrayDataset, Arrays, Field, as_numbers, spread
from trainer.errors import BadInputError, OwnCodeError
from trainer.host.here import path_shown
from trainer.launch.worker import current
from trainer.rng import Float32, Ints, Purpose, key

_UNIFORMS = 4  # random numbers per sample, of 24 bits each: enough for a seed of 64 bits
_HASHED = 16  # samples in the fingerprint
_NAMED = 4  # samples named in a message

# Whose threads draw from no global generator: ours, and a notebook's own.
_DRAW_NOTHING = ("trainer", "ipykernel", "IPython", "zmq", "tqdm", "torch", "multiprocessing")
_OURS = f"{Path(__file__).parents[1]}/"
_LIBRARIES = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")})

Collate = Callable[[list[Any]], Any]


class ArrayItems:
    """Map-style data set over named arrays (samples, …); an item is a dict of copied rows."""

    def __init__(self, arrays: Arrays) -> None:
        """Wraps arrays of the same length, without a copy."""
        self._arrays = arrays

    def __len__(self) -> int:
        """Number of samples."""
        return len(next(iter(self._arrays.values())))

    @property
    def labels(self) -> npt.NDArray[np.generic] | None:
        """See `ArrayDataset.labels`."""
        return ArrayDataset(self._arrays).labels

    def __getitem__(self, sample: int) -> dict[str, Any]:
        """Returns copies of a sample's rows, which a transform may change in place."""
        return {name: array[sample].copy() for name, array in self._arrays.items()}


class ItemDataset:
    """Data set whose batches are collated from the items of a map-style data set (see `Dataset`).

    Attributes:
        user_objects: The map-style data set, transforms and collate function, which loader workers must be
            able to import (see `workers.check_importable`).
    """

    def __init__(
        self,
        items: Any,
        what: str,
        collate: Collate | None = None,
        transforms: Sequence[Callable[[Any], Any]] = (),
        num_items: int = 1,
    ) -> None:
        """Reads the first sample to learn the fields, and the last to check them.

        Args:
            items: Map-style data set, with __getitem__ and __len__.
            what: Use of the data for messages, "training" or "evaluation".
            collate: Converts a list of items to named tensors (n, …), of the same shapes each time; None
                stacks the arrays of items that are dicts or tuples.
            transforms: Applied to each item in this order.
            num_items: Largest number of items of a sample, if there is a field "num_items".

        Raises:
            BadInputError: If the data set has no length or no samples, a sample differs when it is read again
                with the same seeds, or items can't be batched.
        """
        self._items, self._what, self._collate, self._transforms = items, what, collate, tuple(transforms)
        self._name = type(items).__name__
        if isinstance(items, torch.utils.data.IterableDataset):
            raise BadInputError(
                f"{what} data: {self._name} is an IterableDataset, whose samples have no numbers: no run "
                "could go on in the middle of it; give a data set with __getitem__ and __len__"
            )
        try:
            count = len(items)
        except (TypeError, NotImplementedError) as error:
            raise BadInputError(
                f"{what} data: {self._name} has no length; a data set needs __len__, as the order of the "
                "samples is decided before they are read"
            ) from error
        if not count:
            raise BadInputError(f"{what} data: {self._name} has no samples")
        self.user_objects = (items, *transforms, *([collate] if collate else []))
        self.num_items, self.uniforms, self.in_process = num_items, _UNIFORMS, False
        self.arrays: Arrays | None = None
        self.buckets: tuple[int, ...] = ()
        self.fields: Mapping[str, Field] = {}
        first, again, last = (self._tried([number]) for number in (0, 0, count - 1))
        for name, array in first.items():
            # Compared as bytes: NaN equals itself then.
            if again[name].tobytes() != array.tobytes():
                raise self._wrong(
                    f"another '{name}' the second time for the same sample and seeds: draw from torch, "
                    "numpy.random or random, which are seeded for each sample (np.random.default_rng() isn't)"
                )
        if NUM_ITEMS in first and (first[NUM_ITEMS].dtype != np.int64 or first[NUM_ITEMS].ndim != 1):
            raise self._wrong(f"'{NUM_ITEMS}' that isn't one int64 for each sample")
        self.fields = {name: Field(array.shape[1:], array.dtype) for name, array in first.items()}
        self._check(last, np.array([count - 1]))

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._items)

    @property
    def labels(self) -> Any:
        """Class of each sample, the `targets` or `labels` of the map-style data set; None without either."""
        return _labels_of(self._items)

    def fingerprint(self) -> str:
        """Returns the data set's own fingerprint if it has one, else a hash of 16 evenly spaced samples."""
        if hasattr(self._items, "fingerprint"):
            return str(self._items.fingerprint())
        digest = hashlib.sha256()
        for sample in spread(len(self), _HASHED):
            for name, array in sorted(self._tried([int(sample)]).items()):
                digest.update(f"{name} {array.dtype} {array.shape};".encode() + array.tobytes())
        return f"{len(self)} samples {digest.hexdigest()[:16]}"

    def read(self, samples: Ints, random: Float32 | None, out: Arrays) -> None:
        """See `Dataset.read`."""
        if random is None:
            keys = [key(Purpose.ITEM, int(sample)) for sample in samples]
        else:
            parts = (random[:, -_UNIFORMS:] * 2.0**24).astype(np.int64).tolist()
            keys = [key(Purpose.ITEM, *numbers) for numbers in parts]
        arrays = self._batch(samples.tolist(), keys)
        self._check(arrays, samples)
        for name, array in arrays.items():
            out[name][...] = array

    def _batch(self, samples: list[int], keys: list[int]) -> dict[str, npt.NDArray[Any]]:
        """Returns the arrays (n, …) of items, each read with the random generators seeded by its key."""
        with state_kept():
            items, method, at = [], "", samples
            try:
                for sample, each in zip(samples, keys, strict=True):
                    _seed(each)
                    method, at = "__getitem__", [sample]
                    item = self._items[sample]
                    method = "transforms"
                    for transform in self._transforms:
                        item = transform(item)
                    items.append(item)
                method, at = "collate", samples
                parts = self._stacked(items, samples) if self._collate is None else self._collate(items)
            except BadInputError:
                raise
            except Exception as error:
                raise self._raised(error, method, at) from error
        try:
            return {name: as_numbers(name, value) for name, value in _by_name(parts).items()}
        except ValueError as error:
            raise self._wrong(str(error)) from error

    def _raised(self, error: Exception, method: str, samples: list[int]) -> OwnCodeError:
        """Returns an error that names the file and line in the user's code."""
        # Without the frame of `_batch`.
        within = error.__traceback__ and error.__traceback__.tb_next
        frames = [frame for frame in traceback.extract_tb(within) if not frame.filename.startswith(_OURS)]
        # The last frame of the user's code: frames of libraries that it called follow.
        own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)] or frames[:1]
        where = f" in {path_shown(Path(own[-1].filename))}:{own[-1].lineno}" if own else ""
        numbers = ", ".join(map(str, samples[:_NAMED])) + ", …" * (len(samples) > _NAMED)
        what = (str(error) or "no message").splitlines()[0]
        return OwnCodeError(
            f"{self._what} data: {self._name}[{numbers}]:{where} ({method}): {type(error).__name__}: {what}",
            "".join(traceback.format_exception(type(error), error, within)),
        )

    def _stacked(self, items: list[Any], samples: list[int]) -> dict[str, Any]:
        """Stacks each field of the items: arrays (n, …)."""
        named = []
        for sample, item in zip(samples, items, strict=True):
            try:
                named.append({name: as_numbers(name, value) for name, value in _by_name(item).items()})
            except ValueError as error:
                raise self._wrong(f"{error} (sample {sample})") from error
        if any(one.keys() != named[0].keys() for one in named):
            raise self._wrong("items with different fields")
        try:
            return {name: np.stack([one[name] for one in named]) for name in named[0]}
        except ValueError as error:
            shapes = {n: [np.shape(one[n]) for one in named[:4]] for n in named[0]}
            odd = next((f"'{n}' of shapes {s}" for n, s in shapes.items() if len({*s}) > 1), str(error))
            raise self._wrong(f"{odd}: give the task a method collate(items) that pads them") from error

    def _tried(self, samples: list[int]) -> dict[str, npt.NDArray[Any]]:
        """Reads samples with the seeds of evaluation; an error in the user's code becomes one line.

        Raises:
            BadInputError: If the user's code raises, or there are no arrays with one row per sample.
        """
        try:
            arrays = self._batch(samples, [key(Purpose.ITEM, sample) for sample in samples])
        except OwnCodeError as error:
            raise BadInputError(str(error)) from error.__cause__
        if not arrays:
            raise self._wrong("nothing")
        for name, array in arrays.items():
            if array.ndim < 1 or len(array) != len(samples):
                raise self._wrong(f"'{name}' of shape {array.shape} for {len(samples)} samples")
        return arrays

    def _check(self, arrays: Mapping[str, npt.NDArray[Any]], samples: Ints) -> None:
        """Checks that a batch has the fields of the first sample, with their dtypes and shapes.

        Raises:
            BadInputError: If it differs.
        """
        more = ", …" if len(samples) > _NAMED else ""
        where = f"of the samples {', '.join(map(str, samples[:_NAMED]))}{more}"
        if arrays.keys() != self.fields.keys():
            raise self._wrong(f"{', '.join(arrays)} {where}, and {', '.join(self.fields)} of the first")
        for name, (shape, dtype) in self.fields.items():
            if arrays[name].dtype != dtype:
                raise self._wrong(
                    f"'{name}' as {arrays[name].dtype} {where}, and {dtype} of the first: give one type"
                )
            if arrays[name].shape != (len(samples), *shape):
                usual = ", ".join(("n", *map(str, shape)))
                raise self._wrong(
                    f"'{name}' of shape {arrays[name].shape} {where}, and ({usual}) of the first: pad to one "
                    "size (a method collate(items) may do it), and cut it in `loss` if need be"
                )

    def _wrong(self, gave: str) -> BadInputError:
        giver = "collate" if self._collate is not None else self._name
        return BadInputError(f"{self._what} data: {giver} gave {gave}")


def is_items(part: Any) -> bool:
    """True for a map-style data set: torch's Dataset, or a user's class with __getitem__."""
    return isinstance(part, torch.utils.data.Dataset) or (
        hasattr(part, "__getitem__") and not isinstance(part, str | bytes | list | tuple | np.ndarray)
    )


def _labels_of(items: Any) -> Any:
    """Returns the labels of a map-style data set, also of torch's Subset and ConcatDataset; None without."""
    if isinstance(items, torch.utils.data.Subset):
        of_all = _labels_of(items.dataset)
        return None if of_all is None else of_all[np.asarray(items.indices)]
    if isinstance(items, torch.utils.data.ConcatDataset):
        parts = [_labels_of(part) for part in items.datasets]
        return None if any(part is None for part in parts) else np.concatenate(parts)
    targets = getattr(items, "targets", None)  # as torchvision calls them
    given = getattr(items, "labels", None) if targets is None else targets
    if given is None:
        return None
    with suppress(TypeError, ValueError):  # a number, or arrays of different lengths
        if len(labels := np.asarray(given)) == len(items):
            return labels
    raise BadInputError(
        f"data.class_weights: the labels of {type(items).__name__} aren't one whole number for each of its "
        f"{len(items):,} samples"
    )


def _by_name(item: Any) -> dict[str, Any]:
    """Returns the fields of an item or a collated batch by name; those of a tuple are named "0", "1", …"""
    if isinstance(item, Mapping):
        named = {str(name): value for name, value in item.items()}
        if len(named) < len(item):
            raise ValueError(f"names that are the same as text ({', '.join(map(repr, item))})")
        return named
    if isinstance(item, list | tuple):
        return {str(number): value for number, value in enumerate(item)}
    if isinstance(item, torch.Tensor | np.ndarray):
        return {"0": item}
    raise ValueError(f"a {type(item).__name__} where a dict of tensors or a tuple is wanted")


def _seed(each: int) -> None:
    """Seeds the global random generators by a key of 64 bits."""
    random.seed(each)
    # The third word makes the numbers differ from those of random: both are MT19937.
    np.random.seed([each & 0xFFFFFFFF, each >> 32, 1])
    torch.default_generator.manual_seed(each >> 1)


def draws_alone() -> bool:
    """True if no thread lives that may draw from numpy's or Python's global generators, too."""
    others = [frame for thread, frame in sys._current_frames().items() if thread != threading.get_ident()]
    return current() is not None or all(
        _began_in(frame).partition(".")[0] in _DRAW_NOTHING for frame in others
    )


def _began_in(frame: FrameType | None) -> str:
    """Returns the module in which a thread began, beside Python's own that starts it."""
    name = ""
    while frame is not None:
        name = found if (found := str(frame.f_globals.get("__name__"))) != "threading" else name
        frame = frame.f_back
    return name


class HostGenerators:
    """numpy's and Python's global generators, which are seeded together; `close` gives their states back."""

    def __init__(self) -> None:
        """Remembers their states."""
        self._kept = random.getstate(), np.random.get_state()

    def manual_seed(self, seed: int) -> None:
        """Seeds both, as torch's generators are."""
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)

    def moved(self) -> bool:
        """True if a number was drawn from one of them since this object was made."""
        now = random.getstate(), np.random.get_state()
        return pickle.dumps(now) != pickle.dumps(self._kept)

    def close(self) -> None:
        """Restores the remembered states."""
        random.setstate(self._kept[0])
        np.random.set_state(self._kept[1])


@contextmanager
def state_kept() -> Iterator[None]:
    """Context manager that restores the global random generators, which training uses in the same process."""
    ours, numpys, torchs = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(ours)
        np.random.set_state(numpys)
        torch.default_generator.set_state(torchs)
