"""Batches of a loader as bytes, and data sets that tell what was read of them."""

from typing import Any

import numpy as np
import torch

from trainer.config.data import LoaderConfig
from trainer.data.batch import Batch
from trainer.data.dataset import Arrays, Field
from trainer.data.formats.tokens import TOKENS
from trainer.data.loader import Loader, Source
from trainer.data.sampling.plan import Plan, Share
from trainer.errors import BadInputError
from trainer.rng import Float32, Ints

CPU = torch.device("cpu")
FORK = LoaderConfig(start_method="fork")


class Numbers:
    """A data set that isn't in memory: what it returns tells sample and random numbers."""

    def __init__(self, samples: int, fail_at: int = -1) -> None:
        self.samples = samples
        self.fail_at = fail_at
        self.fields = {"x": Field((3,), np.dtype(np.float32)), "num_items": Field((), np.dtype(np.int64))}
        self.num_items = 9
        self.uniforms = 2
        self.arrays: Arrays | None = None
        self.in_process = False

    def __len__(self) -> int:
        return self.samples

    def fingerprint(self) -> str:
        return f"{self.samples} samples"

    def read(self, samples: Ints, random: Float32 | None, out: Arrays) -> None:
        if self.fail_at in samples:
            raise BadInputError(f"sample {self.fail_at}: torn")
        assert random is not None
        out["x"][:, 0] = samples
        out["x"][:, 1:] = random[:, :2]
        out["num_items"][...] = samples % 9 + 1


def source(dataset: Any, last: Any = "weighted", micro_batch_size: int = 4, uniforms: int = 3) -> Source:
    plan = Plan(len(dataset), 2 * micro_batch_size, micro_batch_size, epochs=2, last=last, seed=5)
    return Source(dataset, Share(plan), uniforms)


def frozen(batch: Batch) -> list[bytes]:
    tensors = [*batch.fields.values(), batch.weight, batch.uniform]
    parts = [b"" if t is None else t.contiguous().numpy().tobytes() for t in tensors]
    return [*parts, str(batch.num_items).encode()]


def read_all(loader: Loader, batches: range) -> list[list[bytes]]:
    try:
        return [frozen(batch) for batch in loader(batches)]
    finally:
        loader.close()


def arrays_of(data: Any, samples: Any = None, random: Any = None) -> tuple[dict[str, Any], Any]:
    """Samples, or all, by field, and which were bad. `random`: what is drawn, or a number for all of it."""
    samples = np.arange(len(data)) if samples is None else np.asarray(samples)
    out: dict[str, Any] = {n: np.full((len(samples), *f.shape), 77, f.dtype) for n, f in data.fields.items()}
    if isinstance(random, float):
        random = np.full((len(samples), data.uniforms + 2), random, np.float32)
    return out, data.read(samples, random, out)


def rows(data: Any, samples: Any = None) -> Any:
    return arrays_of(data, samples)[0][TOKENS]
