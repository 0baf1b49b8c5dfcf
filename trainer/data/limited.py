"""Evenly spaced samples of a data set (data.limit), for short trials."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainer.data.corrupt import Bad
from trainer.data.dataset import Arrays, Dataset, Field, spread
from trainer.rng import Float32, Ints


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
        return None if labels is None else np.asarray(labels)[self._chosen]

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
