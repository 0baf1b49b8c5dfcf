"""The small run that `python -m benchmarks resume` cuts: its samples, its model, and what is noted of it."""

from typing import NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

EPOCHS, BATCHES, BATCH = 3, 20, 8
UPDATES = EPOCHS * BATCHES
RATE = 0.01
FEATURES, CLASSES = 16, 4

Sample = tuple[torch.Tensor, ...]


class Steps:
    """Record of a run: samples of each update, in order, and its loss; finally the weights."""

    def __init__(self) -> None:
        self.samples: list[list[int]] = []
        self.losses: list[float] = []
        self.weights = torch.empty(0)

    def add(self, samples: torch.Tensor, loss: torch.Tensor) -> None:
        """Notes an update: int64 (n,) and float ()."""
        self.samples.append(samples.tolist())
        self.losses.append(float(loss.detach()))

    def end(self, model: nn.Module) -> None:
        """Notes the weights as they are."""
        self.weights = torch.cat([p.detach().flatten() for p in model.parameters()])


class Resumed(NamedTuple):
    """A run and what went on from its checkpoint.

    Attributes:
        whole: All updates.
        later: Those of the second run.
        way: How the library was used.
        variant: Where a library is measured in more than one way, which one.
    """

    whole: Steps
    later: Steps
    way: str
    variant: str = ""


def arrays() -> dict[str, torch.Tensor]:
    """The samples: `index`, by which they are known again, `x` and `y`."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(BATCHES * BATCH, FEATURES, generator=random)
    y = torch.randint(CLASSES, (len(x),), generator=random)
    return {"index": torch.arange(len(x)), "x": x, "y": y}


class Augmented(Dataset[Sample]):
    """The samples as libraries like them, augmented where transforms do it: when a sample is read.

    Args:
        as_read: False leaves that to the one who has the batch.
    """

    def __init__(self, as_read: bool = True) -> None:
        self._arrays, self._as_read = arrays(), as_read

    def __len__(self) -> int:
        return BATCHES * BATCH

    def __getitem__(self, sample: int) -> Sample:
        index, x, y = (array[sample] for array in self._arrays.values())
        return index, augment(x) if self._as_read else x, y


def augment(x: torch.Tensor) -> torch.Tensor:
    """Noise from torch's global generator, for a sample or a batch."""
    return x + torch.rand(x.shape) - 0.5


def shuffled(as_read: bool = True, generator: torch.Generator | None = None) -> DataLoader[Sample]:
    """The ordinary loader, which may be given a generator of its own."""
    return DataLoader(Augmented(as_read), batch_size=BATCH, shuffle=True, generator=generator)


def small_model() -> nn.Module:
    """Returns a small model with dropout."""
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Dropout(0.3), nn.Linear(32, CLASSES))


def optimized(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW, and a cosine to 0 at the end of the run."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, UPDATES)
