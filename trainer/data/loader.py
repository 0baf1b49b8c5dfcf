"""Loaders: they turn a rank's share of a plan into batches on its device.

What a batch holds depends on (seed, epoch, sample) alone, so the number of workers, the prefetch and the
place where the data lives change nothing but the time it takes.
"""

import contextlib
import multiprocessing
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch.utils.data import DataLoader, Dataset as TorchDataset

from trainer.config import Section
from trainer.data import dataset as data
from trainer.data.device import copied_ahead
from trainer.data.ring import Ring
from trainer.errors import BadInputError
from trainer.keyed_rng import Ints, uniforms
from trainer.plan import Share

_RESIDENT_BYTES = 256 << 20
_CHUNK_SAMPLES = 8192
_WEIGHT = "weight"
_UNIFORM = "uniform"


class LoaderConfig(Section):
    """How batches reach the device. None of this changes what is in them."""

    workers: Annotated[int, Field(ge=0, le=1024)] | Literal["auto"] = Field(
        "auto", description="loader processes per rank; auto: 0 if resident, else 75 % of the CPU share"
    )
    prefetch: int = Field(4, ge=1, le=1024, description="batches that each worker prepares ahead")
    resident: bool | Literal["auto"] = Field(
        "auto", description="keep the data set on the device; auto: if it is in memory and below 256 MiB"
    )
    start_method: Literal["fork", "forkserver", "spawn"] = Field(
        "fork" if sys.platform == "linux" else "spawn", description="how workers are started"
    )


class Batch(NamedTuple):
    """One shard on its device.

    Attributes:
        fields: A tensor (micro_batch, *shape) for each field of the data set.
        weight: float32 (micro_batch,), 0 for padding; None where nothing is padded.
        uniform: float32 (micro_batch, n) in [0, 1), keyed by sample and epoch, for the augmentation;
            None where none was asked for.
        units: What the loss of this shard is a sum over: samples, or valid tokens.
    """

    fields: Mapping[str, torch.Tensor]
    weight: torch.Tensor | None
    uniform: torch.Tensor | None
    units: int


@dataclass(frozen=True)
class Source:
    """What to load: the data set, this rank's share of it, and what each sample carries along."""

    dataset: data.Dataset
    share: Share
    uniforms: int = 0  # for each sample: the data set's own first, then the task's

    @property
    def padded(self) -> bool:
        """Whether shards carry weights."""
        return self.share.plan.last == "weighted"

    def extras(self, batches: Ints) -> tuple[Ints, dict[str, npt.NDArray[Any]]]:
        """Samples (n, micro_batch) of some batches, and their weights and random numbers."""
        epoch, sample, weight = self.share.plan.read(self.share.shards(batches))
        extras = {}
        if self.padded:
            extras[_WEIGHT] = weight
        if self.uniforms:
            extras[_UNIFORM] = uniforms(self.share.plan.seed, epoch, sample, self.uniforms)
        return sample, extras

    def batch(self, fields: dict[str, torch.Tensor], units: int) -> Batch:
        """Sorts what travelled together into a batch."""
        return Batch(fields, fields.pop(_WEIGHT, None), fields.pop(_UNIFORM, None), units)


class ResidentLoader:
    """The data set lies on the device; a batch is a gather there."""

    def __init__(self, source: Source, device: torch.device) -> None:
        """Copies the data set to the device."""
        assert source.dataset.arrays is not None
        self._source = source
        self._device = device
        self._units = source.dataset.arrays.get(data.UNITS)
        self._tensors = {
            name: torch.from_numpy(array).to(device) for name, array in source.dataset.arrays.items()
        }

    def __call__(self, batches: range) -> Iterator[Batch]:
        """Yields these batches of the rank."""
        source = self._source
        chunk = max(1, _CHUNK_SAMPLES // source.share.plan.micro_batch)
        for first in range(batches.start, batches.stop, chunk):
            sample, extras = source.extras(np.arange(first, min(first + chunk, batches.stop)))
            rows = {name: self._rows(array) for name, array in extras.items()}
            units = self._count(sample, extras)
            for index, picked in enumerate(self._rows(sample)):
                fields = {
                    name: torch.index_select(tensor, 0, picked) for name, tensor in self._tensors.items()
                }
                for name, row in rows.items():
                    fields[name] = row[index]
                yield source.batch(fields, units[index])

    def _rows(self, array: npt.NDArray[Any]) -> Sequence[torch.Tensor]:
        tensor = torch.from_numpy(array)
        if self._device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True).unbind(0)

    def _count(self, sample: Ints, extras: dict[str, npt.NDArray[Any]]) -> list[int]:
        units: npt.NDArray[Any] = np.full(sample.shape, self._source.dataset.units)
        if self._units is not None:
            units = self._units[sample]
        return [int(row) for row in (units * extras.get(_WEIGHT, np.float32(1))).sum(1)]

    def close(self) -> None:
        """Nothing to stop."""


class _Filler(TorchDataset[tuple[int, int | str]]):
    """What a worker does: fills the slot of a batch, and returns the batch's number and units.

    Bad data is returned as its message: an exception would arrive with a worker's traceback in its text.
    """

    def __init__(self, source: Source, ring: Ring) -> None:
        self._source = source
        self._ring = ring

    def __getitem__(self, batch: int) -> tuple[int, int | str]:
        try:
            return batch, self._fill(batch)
        except BadInputError as error:
            return batch, str(error)

    def _fill(self, batch: int) -> int:
        sample, extras = self._source.extras(np.array([batch]))
        out = self._ring.arrays(batch)
        for name, array in extras.items():
            out[name][...] = array[0]
        random = extras[_UNIFORM][0] if _UNIFORM in extras else None
        self._source.dataset.read(sample[0], random, out)
        weight = extras.get(_WEIGHT, np.ones((1, sample.shape[1]), np.float32))[0]
        units = out.get(data.UNITS, np.int64(self._source.dataset.units))
        return int((units * weight).sum())


class RingLoader:
    """Workers read and decode; batches cross to the device from a ring of shared memory."""

    def __init__(self, source: Source, device: torch.device, workers: int, config: LoaderConfig) -> None:
        """Makes the ring and starts the workers, which stay until `close`."""
        plan = source.share.plan
        fields = {
            name: data.Field((plan.micro_batch, *field.shape), field.dtype)
            for name, field in source.dataset.fields.items()
        }
        if source.padded:
            fields[_WEIGHT] = data.Field((plan.micro_batch,), np.dtype(np.float32))
        if source.uniforms:
            fields[_UNIFORM] = data.Field((plan.micro_batch, source.uniforms), np.dtype(np.float32))
        self._source = source
        self._device = device
        # Two slots more than can be under way: the batch in use and the one that is being copied.
        slots = workers * config.prefetch + 2
        self._ring = Ring(fields, slots, inherited=workers == 0 or config.start_method == "fork")
        self._filler = _Filler(source, self._ring)
        self._numbers: list[range] = [range(0)]
        self._loader: DataLoader[tuple[int, int | str]] | None = None
        self._pinned = False
        if workers:
            self._loader = DataLoader(
                self._filler,
                batch_size=None,
                sampler=_Current(self._numbers),
                num_workers=workers,
                prefetch_factor=config.prefetch,
                persistent_workers=True,
                multiprocessing_context=multiprocessing.get_context(config.start_method),
                worker_init_fn=_ignore_signals,
            )
            # With nothing to read yet, this starts the workers: before there are threads that a fork
            # would cut short, and before the ring is registered with CUDA.
            list(self._loader)

    def __call__(self, batches: range) -> Iterator[Batch]:
        """Yields these batches of the rank; a CPU batch is valid until the next but one is asked for."""
        self._numbers[0] = batches
        results = iter(self._loader) if self._loader else (self._filler[number] for number in batches)
        filled = map(_checked, results)
        if self._device.type != "cuda":
            for number, units in filled:
                yield self._source.batch(self._ring.unpack(self._ring.slot(number)), units)
            return
        self._pinned = self._pinned or self._ring.pin()
        slots = ((self._ring.slot(number), units) for number, units in filled)
        for slot, units in copied_ahead(slots, self._device, staged=not self._pinned):
            yield self._source.batch(self._ring.unpack(slot), units)

    def close(self) -> None:
        """Ends the workers and gives the memory back."""
        running = getattr(self._loader, "_iterator", None)
        if running is not None:
            running._shutdown_workers()  # torch ends them only when nobody holds the iterator
        self._loader = None
        if self._pinned:
            with contextlib.suppress(RuntimeError):  # of a run that failed already
                torch.cuda.synchronize(self._device)
            self._ring.unpin()
            self._pinned = False


def _checked(filled: tuple[int, int | str]) -> tuple[int, int]:
    number, units = filled
    if isinstance(units, str):
        raise BadInputError(units)
    return number, units


class _Current:
    """A sampler whose batches can be set anew while the workers stay."""

    def __init__(self, numbers: list[range]) -> None:
        self._numbers = numbers

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers[0])

    def __len__(self) -> int:
        return len(self._numbers[0])


def _ignore_signals(_worker: int) -> None:
    # Ctrl-C and a scheduler's signal reach the whole group, but stopping is the rank's decision; and the
    # handler that the rank installed must not keep a worker from being terminated.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


Loader = ResidentLoader | RingLoader


def make_loader(source: Source, device: torch.device, config: LoaderConfig, cpu_workers: int) -> Loader:
    """Chooses the loader.

    Args:
        source: What to load.
        device: Where the batches are wanted.
        config: How.
        cpu_workers: What `workers: auto` stands for where the data is not resident.

    Returns:
        A loader; call it with a range of batch numbers.
    """
    arrays = source.dataset.arrays
    resident = config.resident
    if resident == "auto":
        resident = arrays is not None and sum(array.nbytes for array in arrays.values()) < _RESIDENT_BYTES
    elif resident and (arrays is None or config.workers not in ("auto", 0)):
        raise BadInputError(
            "data.resident=true needs a data set in memory and no workers: "
            "use data.resident=auto, and leave data.workers at auto or 0"
        )
    if resident and config.workers in ("auto", 0):
        return ResidentLoader(source, device)
    return RingLoader(source, device, cpu_workers if config.workers == "auto" else config.workers, config)
