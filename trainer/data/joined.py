"""Several evaluation sets behind one loader, whose loader workers they share, one set after another."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy.typing as npt
import torch

from trainer.config.data import LoaderConfig
from trainer.data.corrupt import Bad, Quarantine
from trainer.data.dataset import Arrays, Dataset, Field
from trainer.data.loader import Batch, Loader, RingLoader, Source, is_resident, make_loader
from trainer.data.workers import workers_of
from trainer.rng import Float32, Ints


class JoinedDataset:
    """Concatenation of data sets of the same layout; all samples of a `read` belong to one of them."""

    def __init__(self, parts: Sequence[Dataset]) -> None:
        """Takes data sets with equal fields."""
        self.parts, self._ends = tuple(parts), list(accumulate(map(len, parts)))
        first = parts[0]
        self.fields: Mapping[str, Field] = first.fields
        self.num_items, self.uniforms, self.in_process = first.num_items, first.uniforms, False
        self.arrays: Arrays | None = None
        self.user_objects = tuple(own for part in parts for own in getattr(part, "user_objects", ()))

    def __len__(self) -> int:
        """Number of samples of all sets."""
        return self._ends[-1]

    def fingerprint(self) -> str:
        """Fingerprints of all sets."""
        return "; ".join(part.fingerprint() for part in self.parts)

    def first(self, part: int) -> int:
        """Returns the joined number of a set's first sample."""
        return self._ends[part - 1] if part else 0

    def part_of(self, sample: int) -> int:
        """Returns the index of the set that a sample belongs to."""
        return bisect_right(self._ends, sample)

    def read(self, samples: Ints, random: Float32 | None, out: Arrays) -> Sequence[Bad]:
        """See `Dataset.read`."""
        part = self.part_of(int(samples[0]))
        first = self.first(part)
        replaced = self.parts[part].read(samples - first, random, out) or ()
        return [bad._replace(sample=bad.sample + first) for bad in replaced]


@dataclass(frozen=True)
class JoinedSource(Source):
    """Source of this rank's batches of several sets, numbered consecutively.

    Attributes:
        sources: Sources of the sets, in the order of the joined data set.
        ends: Batches up to the end of each set.
    """

    sources: tuple[Source, ...] = ()
    ends: tuple[int, ...] = ()

    def first(self, part: int) -> int:
        """Returns the joined number of a set's first batch."""
        return self.ends[part - 1] if part else 0

    def extras(self, batches: Ints) -> tuple[Ints, dict[str, npt.NDArray[Any]]]:
        """See `Source`; all batches belong to one set."""
        part = bisect_right(self.ends, int(batches[0]))
        sample, extras = self.sources[part].extras(batches - self.first(part))
        assert isinstance(self.dataset, JoinedDataset)
        return sample + self.dataset.first(part), extras


class JoinedQuarantine(Quarantine):
    """Counts the corrupt samples of each set against the set's own budget."""

    def __init__(self, parts: Sequence[Quarantine], joined: JoinedDataset) -> None:
        """Takes a quarantine for each set."""
        self._parts, self._joined = parts, joined

    def add(self, corrupt: Sequence[Bad]) -> None:
        """See `Quarantine`."""
        part = self._joined.part_of(corrupt[0].sample)
        first = self._joined.first(part)
        self._parts[part].add([bad._replace(sample=bad.sample - first) for bad in corrupt])


class PartLoader:
    """Loader of one set of a joined source; its batches are numbered from 0."""

    def __init__(self, loader: RingLoader, source: JoinedSource, part: int) -> None:
        """Takes the loader of all sets and the index of one; `close` of the first ends the loader workers."""
        self._loader, self._part, self._first = loader, part, source.first(part)
        self._rows = source.sources[part].share.plan.micro_batch_size

    def __call__(self, batches: range) -> Iterator[Batch]:
        """Yields these batches of the rank; see `RingLoader`."""
        for batch in self._loader(range(batches.start + self._first, batches.stop + self._first)):
            # A slot has room for a batch of the set with the largest ones.
            fields = {name: tensor[: self._rows] for name, tensor in batch.fields.items()}
            weight = None if batch.weight is None else batch.weight[: self._rows]
            yield batch._replace(fields=fields, weight=weight)

    def take_work(self) -> dict[str, float]:
        """See `RingLoader`."""
        return self._loader.take_work()

    def close(self) -> None:
        """Ends the loader workers if this is the first set."""
        if not self._part:
            self._loader.close()


EvaluationLoader = Loader | PartLoader


def make_loaders(
    sources: Sequence[Source],
    device: torch.device,
    config: LoaderConfig,
    cpu_workers: int,
    quarantines: Sequence[Quarantine],
) -> list[EvaluationLoader]:
    """Makes loaders for evaluation sets; sets that need workers and have one layout share them.

    Args:
        sources: Source of each set.
        device: Device of the batches.
        config: Loader configuration.
        cpu_workers: See `make_loader`.
        quarantines: Quarantine of each set.

    Returns:
        A loader for each set.
    """
    joined = [
        number
        for number, source in enumerate(sources)
        if workers_of(config, source.dataset, cpu_workers) and not is_resident(config, source.dataset)
    ]
    # Sets whose slots look like those of the first share its ring; the rank itself reads the others.
    layouts = [_layout(source.dataset) for source in sources]
    joined = [number for number in joined if layouts[number] == layouts[joined[0]]]
    parts = dict[int, PartLoader]()
    if len(joined) > 1:
        data = JoinedDataset([sources[number].dataset for number in joined])
        some = tuple(sources[number] for number in joined)
        largest = max(some, key=lambda source: source.share.plan.micro_batch_size)
        ends = tuple(accumulate(len(source.share.batches()) for source in some))
        source = JoinedSource(data, largest.share, sources=some, ends=ends)
        quarantine = JoinedQuarantine([quarantines[number] for number in joined], data)
        workers = workers_of(config, some[0].dataset, cpu_workers)
        loader = RingLoader(source, device, workers, config, quarantine)
        parts = {number: PartLoader(loader, source, part) for part, number in enumerate(joined)}
    here = config.model_copy(update={"workers": 0})
    return [
        parts.get(number)
        or make_loader(source, device, config if number in joined else here, cpu_workers, quarantines[number])
        for number, source in enumerate(sources)
    ]


def _layout(dataset: Dataset) -> tuple[object, ...]:
    return dict(dataset.fields), dataset.num_items, dataset.uniforms
