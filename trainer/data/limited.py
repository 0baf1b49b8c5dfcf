"""A part of a data set, for tries: evenly spaced samples of it."""

from collections.abc import Mapping, Sequence

import numpy as np

from trainer.data.corrupt import Bad
from trainer.data.dataset import Arrays, Dataset, Field, spread
from trainer.rng import Float32, Ints


class LimitedDataset:
    """Some samples of a data set, numbered anew in its order.

    Attributes:
        whole: That data set.
    """

    def __init__(self, whole: Dataset, limit: int) -> None:
        """Takes `limit` of them, from the first to the last."""
        self.whole, self._chosen = whole, spread(len(whole), limit)
        self.fields: Mapping[str, Field] = whole.fields
        self.num_items, self.uniforms, self.in_process = whole.num_items, whole.uniforms, whole.in_process
        self.arrays: Arrays | None = None
        if whole.arrays is not None:
            self.arrays = {name: array[self._chosen] for name, array in whole.arrays.items()}
        self.left_out = getattr(whole, "left_out", ())
        self.brought = getattr(whole, "brought", ())
        ends = np.cumsum([0, *getattr(whole, "buckets", ())])
        counts = np.diff(np.searchsorted(self._chosen, ends)).tolist()
        self.buckets = tuple(count for count in counts if count)

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._chosen)

    def fingerprint(self) -> str:
        """Of the whole, and how many of it; see `Dataset.fingerprint`."""
        return f"{len(self)} evenly spaced of {self.whole.fingerprint()}"

    def read(self, samples: Ints, random: Float32 | None, out: Arrays) -> Sequence[Bad]:
        """See `Dataset.read`."""
        replaced = self.whole.read(self._chosen[samples], random, out) or ()
        return [bad._replace(sample=int(np.searchsorted(self._chosen, bad.sample))) for bad in replaced]


def limited(dataset: Dataset, limit: int | None) -> Dataset:
    """At most so many samples of a data set."""
    return dataset if limit is None or len(dataset) <= limit else LimitedDataset(dataset, limit)
