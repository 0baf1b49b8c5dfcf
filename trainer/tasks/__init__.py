"""What is learned. A task says what the model is, what its loss is, and what is measured."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from trainer.data.dataset import Dataset
from trainer.data.loader import Batch


class Task(Protocol):
    """The seam between the trainer and what is trained.

    Attributes:
        train_data: Data set to learn from.
        evaluation_data: Data set to measure on.
        uniforms: Random numbers that `loss` wants for each sample, for augmentation on the device;
            they are the last columns of `Batch.uniform`.
        metric: Name of the figure, among those of `measure`, that says how good the model is.
    """

    train_data: Dataset
    evaluation_data: Dataset
    uniforms: int
    metric: str

    def describe(self) -> Mapping[str, Any]:
        """What somebody who uses the weights must know of the data: for the manifest, so JSON."""
        ...

    def model(self) -> nn.Module:
        """A new model, on the CPU or on the meta device."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The loss of a shard: a sum over its units (never a mean), weighted; float ()."""
        ...

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Weighted sums over the samples of a shard, each (); divided by the units of the whole set."""
        ...
