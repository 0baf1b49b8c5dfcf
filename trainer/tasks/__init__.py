"""What is learned. A task says what the model is, what its loss is, and what is measured.

A domain each: classification, detection, language, audio, one's own; and their augmentation. Imports `data`,
`models` and what is below them; knows neither ranks nor the loop. A loss is a sum over a batch's items, never
a mean, so that any split into micro-batches gives the same gradients.
"""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

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
        metric: Name of the metric, among those of `measure`, that says how good the model is.
        lower_is_better: Whether a lower metric is the better one.
    """

    train_data: Dataset
    evaluation_data: Dataset
    uniforms: int
    metric: str
    lower_is_better: bool

    def describe(self) -> Mapping[str, Any]:
        """What somebody who uses the weights must know of the data: for the manifest, so JSON."""
        ...

    def model(self) -> nn.Module:
        """A new model, on the CPU or on the meta device."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The loss of a micro-batch: a sum over its items (never a mean), weighted; float ()."""
        ...

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        """What is measured on a micro-batch of n samples.

        Returns:
            By name, weighted sums over the samples, each (), which are divided by the items of the whole
            set; or a row for each sample, (n, ...), which `summarise` sees all of.
        """
        ...


class Summarising(Task, Protocol):
    """A task whose `measure` gives rows."""

    def summarise(self, rows: Mapping[str, torch.Tensor]) -> Mapping[str, float]:
        """Metrics of the whole evaluation set from its rows, in the order of the samples, on the CPU."""
        ...


@runtime_checkable
class Checked(Protocol):
    """A task with more to look at before there are ranks than opening its data does."""

    def check(self) -> None:
        """Raises BadInputError, naming what is wrong."""
        ...


class Exportable(Task, Protocol):
    """A task whose model can be called without it."""

    def inputs(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """What the model is called with in evaluation: for export, prediction and latency."""
        ...
