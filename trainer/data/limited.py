"""A part of a data set, for tries: evenly spaced samples of it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainer.data.corrupt import Bad
from trainer.data.dataset import Arrays, Dataset, Field, spread
from trainer.rng import Float32, Ints


class LimitedDataset:
    """Evenly spaced samples, numbered anew, of a data set that has no `only` of its own."""

    def __init__(self, whole: Dataset, chosen: Ints) -> None:
        self._whole, self._chosen = whole, chosen
        self.fields: Mapping[str, Field] = whole.fields
        self.num_items, self.uniforms, self.in_process = whole.num_items, whole.uniforms, whole.in_process
        self.arrays: Arrays | None = None
        if whole.arrays is not None:
            self.arrays = {name: array[chosen] for name, array in whole.arrays.items()}
        self.left_out = getattr(whole, "left_out", ())
        self.brought = getattr(whole, "brought", ())
        records: Any = getattr(whole, "records", None)
        self.records = records.only(chosen) if hasattr(records, "only") else records
        ends = np.cumsum([0, *getattr(whole, "buckets", ())])
        counts = np.diff(np.searchsorted(chosen, ends)).tolist()
        self.buckets = tuple(count for count in counts if count)

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._chosen)

    @property
    def labels(self) -> Any:
        """Returns the labels of its samples, if the whole has any."""
        labels = getattr(self._whole, "labels", None)
        return None if labels is None else np.asarray(labels)[self._chosen]

    def fingerprint(self) -> str:
        """Fingerprint of the whole, and the number of samples used; see `Dataset.fingerprint`."""
        return f"{len(self)} evenly spaced of {self._whole.fingerprint()}"

    def read(self, samples: Ints, random: Float32 | None, out: Arrays) -> Sequence[Bad]:
        """See `Dataset.read`; of the corrupt samples, those that are among these."""
        replaced = self._whole.read(self._chosen[samples], random, out) or ()
        numbers = {int(self._chosen[sample]): int(sample) for sample in samples}
        return [bad._replace(sample=numbers[bad.sample]) for bad in replaced if bad.sample in numbers]


def limited(dataset: Dataset, limit: int | None) -> Dataset:
    """At most so many samples of a data set, which then is as if there were no others.

    One that knows how to do without the rest has a method `only(samples)`.
    """
    if limit is None or len(dataset) <= limit:
        return dataset
    chosen, only = spread(len(dataset), limit), getattr(dataset, "only", None)
    part: Dataset = LimitedDataset(dataset, chosen) if only is None else only(chosen)
    return part
