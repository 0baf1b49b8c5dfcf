"""Loaders, which turn a rank's micro-batches of a plan into batches on its device.

The content of a batch depends on (seed, epoch, sample) alone; loader workers, prefetch and whether the data
is resident on the device affect speed only.
"""

import contextlib
import multiprocessing
import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset as TorchDataset

from trainer.config.data import LoaderConfig
from trainer.data import dataset as data
from trainer.data.batch import Batch
from trainer.data.corrupt import Bad, Quarantine
from trainer.data.device import copied_ahead
from trainer.data.ring import Ring
from trainer.data.sampling.plan import Share
from trainer.data.workers import (
    SPARE_SLOTS,
    CurrentBatches,
    Work,
    begin_worker,
    check_importable,
    end_by_kill,
    prefetch_of,
    start_method,
    starting,
    without_workers,
    workers_of,
)
from trainer.errors import BadInputError, OwnCodeError, first_line
from trainer.rng import Ints, uniforms

_SECONDS_OF_A_QUEUE = 5.0  # for its thread to end
_RESIDENT_BYTES = 256 << 20
_CHUNK_SAMPLES = 8192
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
# Names of the arrays that accompany the fields in a slot; no field may be named so, see `is_field_name`.
_WEIGHT, _UNIFORM = "\0weight", "\0uniform"


def is_field_name(name: object) -> bool:
    """True if a field may have this name: text without a zero byte, which the loader's own names have."""
    return isinstance(name, str) and "\0" not in name


class NumItems(NamedTuple):
    """Items of a micro-batch, and the most items (or the greatest length) of one of its samples."""

    all: int
    longest: int


@dataclass(frozen=True)
class Source:
    """Source of a loader: the data set, this rank's part of the plan, and the random numbers per sample."""

    dataset: data.Dataset
    share: Share
    uniforms: int = 0  # for each sample: the data set's own first, then the task's

    @property
    def padded(self) -> bool:
        """True if micro-batches have weights."""
        return self.share.plan.last == "weighted"

    def extras(self, batches: Ints) -> tuple[Ints, dict[str, npt.NDArray[Any]]]:
        """Returns the samples (n, micro_batch_size) of some batches, and their weights and random numbers."""
        epoch, sample, weight = self.share.plan.read(self.share.micro_batches(batches))
        extras = {}
        if self.padded:
            extras[_WEIGHT] = weight
        if self.uniforms:
            extras[_UNIFORM] = uniforms(self.share.plan.seed, epoch, sample, self.uniforms)
        return sample, extras

    def chunks(self, batches: range) -> Iterator[range]:
        """Yields parts of a range of batches whose order is computed in one call."""
        size = max(1, _CHUNK_SAMPLES // self.share.plan.micro_batch_size)
        return (batches[first : first + size] for first in range(0, len(batches), size))

    def each(self, batches: range) -> Iterator[tuple[int, Ints, dict[str, npt.NDArray[Any]]]]:
        """Yields number, samples (micro_batch_size,) and extra arrays of each batch."""
        for numbers in self.chunks(batches):
            sample, extras = self.extras(np.arange(numbers.start, numbers.stop))
            for index, number in enumerate(numbers):
                yield number, sample[index], {name: array[index] for name, array in extras.items()}

    def batch(self, fields: dict[str, torch.Tensor], num_items: "NumItems") -> Batch:
        """Makes a batch of the tensors of a slot."""
        return Batch(fields, fields.pop(_WEIGHT, None), fields.pop(_UNIFORM, None), *num_items)


class ResidentLoader:
    """Loader of a data set that is resident on the device; a batch is an index_select."""

    def __init__(self, source: Source, device: torch.device) -> None:
        assert source.dataset.arrays is not None
        self._source = source
        self._device = device
        arrays = source.dataset.arrays
        self._num_items: npt.NDArray[Any] | None = arrays.get(data.NUM_ITEMS)
        self._length: npt.NDArray[Any] | None = arrays.get(data.LENGTH, self._num_items)
        if self._num_items is not None and self._num_items.min() < 0:
            below = int(self._num_items.argmin())
            raise BadInputError(_fewer_than_none(below, self._num_items[below]))
        tensors = {
            name: torch.from_numpy(array if array.flags.writeable else array.copy())
            for name, array in arrays.items()
        }
        # index_select doesn't support these unsigned types: they are viewed as signed.
        self._unsigned = {name: tensor.dtype for name, tensor in tensors.items() if tensor.dtype in _SIGNED}
        self._tensors = {
            name: tensor.view(_SIGNED.get(tensor.dtype, tensor.dtype)).to(device)
            for name, tensor in tensors.items()
        }

    def __call__(self, batches: range) -> Iterator[Batch]:
        """Yields these batches of the rank."""
        source = self._source
        for numbers in source.chunks(batches):
            sample, extras = source.extras(np.arange(numbers.start, numbers.stop))
            rows = {name: self._rows(array) for name, array in extras.items()}
            num_items = self._count(sample, extras)
            for index, picked in enumerate(self._rows(sample)):
                fields = {
                    name: torch.index_select(tensor, 0, picked) for name, tensor in self._tensors.items()
                }
                for name, dtype in self._unsigned.items():
                    fields[name] = fields[name].view(dtype)
                for name, row in rows.items():
                    fields[name] = row[index]
                yield source.batch(fields, num_items[index])

    def _rows(self, array: npt.NDArray[Any]) -> Sequence[torch.Tensor]:
        tensor = torch.from_numpy(array)
        if self._device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True).unbind(0)

    def _count(self, sample: Ints, extras: dict[str, npt.NDArray[Any]]) -> list[NumItems]:
        num_items: npt.NDArray[Any] = np.full(sample.shape, self._source.dataset.num_items)
        if self._num_items is not None:
            num_items = self._num_items[sample]
        length = num_items if self._length is None else self._length[sample]
        weight = extras.get(_WEIGHT, np.float32(1))
        return [_num_items(*row) for row in zip(num_items * weight, length * weight, strict=True)]

    def take_work(self) -> dict[str, float]:
        """Returns {}: no slot is filled, as the data is in memory."""
        return {}

    def close(self) -> None:
        """Does nothing: there is nothing to stop."""


class _Filled(NamedTuple):
    """Result of filling a batch's slot.

    Attributes:
        number: Of the batch.
        num_items: Its items.
        replaced: Corrupt samples that were replaced.
        failed: Error message, if the slot couldn't be filled. An exception would arrive with the loader
            worker's traceback in its text.
        trace: Traceback of an error in user code.
        work: Time that was spent.
    """

    number: int
    num_items: NumItems
    replaced: Sequence[Bad] = ()
    failed: str = ""
    trace: str = ""
    work: Work = Work()


class _Filler(TorchDataset[_Filled]):
    """Data set of a DataLoader whose items are filled slots."""

    def __init__(self, source: Source, ring: Ring) -> None:
        self._source = source
        self._ring = ring

    def __getitem__(self, batch: int) -> _Filled:
        sample, extras = self._source.extras(np.array([batch]))
        return self._fill(batch, sample[0], {name: array[0] for name, array in extras.items()})

    def in_process(self, batches: range) -> Iterator[_Filled]:
        """Fills the slots of batches in this process, one after another."""
        for number, sample, extras in self._source.each(batches):
            yield self._fill(number, sample, extras)

    def _fill(self, batch: int, sample: Ints, extras: dict[str, npt.NDArray[Any]]) -> _Filled:
        began = Work.now()
        filled = self._read(batch, sample, extras)
        return filled._replace(work=began.until_now(len(sample)))

    def _read(self, batch: int, sample: Ints, extras: dict[str, npt.NDArray[Any]]) -> _Filled:
        # With several evaluation sets, a slot has room for the largest batch.
        out = {name: array[: len(sample)] for name, array in self._ring.arrays(batch).items()}
        for name, array in extras.items():
            out[name][...] = array
        try:
            replaced = self._source.dataset.read(sample, extras.get(_UNIFORM), out)
        except BadInputError as error:
            return _Filled(batch, NumItems(0, 0), failed=str(error), trace=getattr(error, "trace", ""))
        if data.NUM_ITEMS not in out and _WEIGHT not in extras:
            most = self._source.dataset.num_items
            return _Filled(batch, NumItems(most * len(sample), most), replaced or ())
        weight = extras.get(_WEIGHT, np.float32(1))
        num_items = out.get(data.NUM_ITEMS, np.full(len(sample), self._source.dataset.num_items))
        if num_items.min() < 0:
            below = int(num_items.argmin())
            return _Filled(batch, NumItems(0, 0), failed=_fewer_than_none(sample[below], num_items[below]))
        length = out.get(data.LENGTH, num_items)
        return _Filled(batch, _num_items(num_items * weight, length * weight), replaced or ())


class RingLoader:
    """Loader whose workers fill a ring of shared memory, from which batches are copied to the device."""

    def __init__(
        self,
        source: Source,
        device: torch.device,
        workers: int,
        config: LoaderConfig,
        quarantine: Quarantine | None = None,
    ) -> None:
        """Allocates the ring and starts the loader workers, which run until `close`.

        Raises:
            BadInputError: If the data set can't be pickled for workers that aren't forked, or the system
                starts no more of them.
        """
        plan = source.share.plan
        method = start_method(config.start_method)
        if workers:
            check_importable(source.dataset, method)
        fields = {
            name: data.Field((plan.micro_batch_size, *field.shape), field.dtype)
            for name, field in source.dataset.fields.items()
        }
        if source.padded:
            fields[_WEIGHT] = data.Field((plan.micro_batch_size,), np.dtype(np.float32))
        if source.uniforms:
            fields[_UNIFORM] = data.Field((plan.micro_batch_size, source.uniforms), np.dtype(np.float32))
        self._source = source
        self._device = device
        prefetch = prefetch_of(config, source.dataset, plan.micro_batch_size)
        slots = workers * prefetch + SPARE_SLOTS
        self._ring = Ring(fields, slots, inherited=workers == 0 or method == "fork")
        self._quarantine = quarantine or Quarantine("training", len(source.dataset))
        self._filler = _Filler(source, self._ring)
        self._numbers: list[range] = [range(0)]
        self._loader: DataLoader[_Filled] | None = None
        self._pinned = False
        self._workers, self._work = workers, Work()
        if workers:
            context = multiprocessing.get_context(method)
            self._loader = DataLoader(
                self._filler,
                batch_size=None,
                sampler=CurrentBatches(self._numbers),
                num_workers=workers,
                prefetch_factor=prefetch,
                persistent_workers=True,
                multiprocessing_context=context,
                worker_init_fn=partial(begin_worker, None if method == "forkserver" else os.getpid()),
            )
            # Iterating over no batches starts the workers: before there are threads, which a fork doesn't
            # copy, and before the ring is registered with CUDA.
            try:
                with starting(workers, context):
                    list(self._loader)
            except (TypeError, AttributeError, pickle.PicklingError) as error:
                raise BadInputError(
                    f"data.start_method={method}: {type(source.dataset).__name__} can't be sent to a loader "
                    f"worker ({first_line(error)}); make what can't be where it is first used, or set "
                    "data.start_method=fork"
                ) from error
            end_by_kill(self._loader._iterator._workers)  # type: ignore[union-attr]

    def __call__(self, batches: range) -> Iterator[Batch]:
        """Yields these batches of the rank; a CPU batch is valid until the second next one is requested."""
        self._numbers[0] = batches
        results = iter(self._loader) if self._loader else self._filler.in_process(batches)
        filled = map(self._checked, results)
        if self._device.type != "cuda":
            for number, num_items in filled:
                yield self._source.batch(self._ring.unpack(self._ring.slot(number)), num_items)
            return
        self._pinned = self._pinned or self._ring.pin()
        slots = ((self._ring.slot(number), num_items) for number, num_items in filled)
        for slot, num_items in copied_ahead(slots, self._device, staged=not self._pinned):
            yield self._source.batch(self._ring.unpack(slot), num_items)

    def take_work(self) -> dict[str, float]:
        """Returns the metrics `loader/*` since the last call; {} if nothing was filled."""
        work, self._work = self._work, Work()
        return work.metrics(self._workers)

    def _checked(self, filled: _Filled) -> tuple[int, NumItems]:
        if filled.trace:
            raise OwnCodeError(filled.failed, filled.trace)
        if filled.failed:
            raise BadInputError(filled.failed)
        if filled.replaced:
            self._quarantine.add(filled.replaced)
        self._work = self._work.plus(filled.work)
        return filled.number, filled.num_items

    def close(self) -> None:
        """Ends the loader workers and frees the memory."""
        running = getattr(self._loader, "_iterator", None)
        if running is not None:
            running._shutdown_workers()  # torch ends them only when the iterator is freed
            for queue in running._index_queues:
                # A thread that outlasts its queue would keep the next loader from forking its workers.
                if (thread := getattr(queue, "_thread", None)) is not None:
                    thread.join(_SECONDS_OF_A_QUEUE)
        self._loader = None
        if self._pinned:
            with contextlib.suppress(RuntimeError):  # of a run that failed already
                torch.cuda.synchronize(self._device)
            self._ring.unpin()
            self._pinned = False
        self._ring.close()


def _fewer_than_none(sample: Any, count: Any) -> str:
    return f"sample {sample} has num_items {count}: give how many items its loss is a sum over, 0 or more"


def _num_items(each: npt.NDArray[Any], length: npt.NDArray[Any]) -> NumItems:
    return NumItems(int(each.sum()), int(length.max()))


Loader = ResidentLoader | RingLoader


def make_loader(
    source: Source,
    device: torch.device,
    config: LoaderConfig,
    cpu_workers: int,
    quarantine: Quarantine | None = None,
) -> Loader:
    """Makes the loader that suits the data set and the configuration.

    Args:
        source: Data set and the rank's part of the plan.
        device: Device of the batches.
        config: Loader configuration.
        cpu_workers: Loader workers for `data.workers=auto` if the data isn't resident.
        quarantine: Counts replaced samples.

    Returns:
        A loader; call it with a range of batch numbers.
    """
    if is_resident(config, source.dataset):
        return ResidentLoader(source, device)
    return RingLoader(source, device, workers_of(config, source.dataset, cpu_workers), config, quarantine)


def is_resident(config: LoaderConfig, dataset: data.Dataset) -> bool:
    """True if a data set is kept on the device, so that nothing has to be loaded.

    Raises:
        BadInputError: If data.resident=true and it can't be.
    """
    arrays, resident = dataset.arrays, config.resident
    if resident == "auto":
        resident = arrays is not None and sum(array.nbytes for array in arrays.values()) < _RESIDENT_BYTES
    elif resident and (arrays is None or not without_workers(config)):
        raise BadInputError(
            "data.resident=true needs a data set in memory and no workers: "
            "use data.resident=auto, and leave data.workers at auto or 0"
        )
    return resident and without_workers(config)
