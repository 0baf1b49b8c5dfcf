"""Tasks: the model, its loss, and the metrics.

A module for each domain: classification, detection, language, audio, custom tasks; and augmentation on the
device. Imports `data`, `models` and the rooms below them; knows neither ranks nor the loop. A loss is a sum
over a batch's items, never a mean, so that any split into micro-batches gives the same gradients; a custom
task gives a value for each sample, of which `own_methods` makes that sum.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from trainer.config.data import DataConfig
from trainer.data.batch import Batch
from trainer.data.dataset import Dataset


class Task(Protocol):
    """Interface of the package's tasks; a custom class, with a loss of `(n,)`, is wrapped to have it.

    Attributes:
        train_data: Training set.
        evaluation_data: Evaluation set.
        uniforms: Random numbers for each sample that `loss` uses, for augmentation on the device; they are
            the last columns of `Batch.uniform`.
        metric: Name of the metric of `measure` or `summarize` that selects the best checkpoint.
        lower_is_better: True if a lower metric is better.
    """

    train_data: Dataset
    evaluation_data: Dataset
    uniforms: int
    metric: str
    lower_is_better: bool

    def describe(self) -> Mapping[str, Any]:
        """Returns facts on the data that users of the weights need, such as the classes, for JSON."""

    def model(self) -> nn.Module:
        """Returns a new model, on the CPU or on the meta device."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns the loss of a micro-batch, float (): a weighted sum over its items, never a mean."""

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Computes the metrics of a micro-batch of n samples.

        Returns:
            Weighted sums over the samples by name, each (), which are divided by the items of the whole
            set; or a row for each sample, (n, ...), which `summarize` gets for the whole set.
        """


class ValuesTask(Task, Protocol):
    """A task that may have several losses, of which `loss` is the trained sum, and says what they count.

    Attributes:
        losses: Names of the losses; `loss/NAME` in metrics records. (): one loss without a name.
        watched: The last names of `losses`, which aren't trained; `watched/NAME` in metrics records.
    """

    losses: tuple[str, ...]
    watched: tuple[str, ...]

    def parts(self, model: nn.Module, batch: Batch) -> tuple[Sequence[torch.Tensor], torch.Tensor | None]:
        """Returns each loss of a micro-batch, in the order of `losses`, as a sum, and what it is a sum over.

        That is float64 (), or None: the batch's items.
        """


def loss_rows(task: object) -> tuple[str, ...]:
    """Returns the names of `ValuesTask.losses` in metrics records; () for a task with one loss."""
    names, watched = getattr(task, "losses", ()), getattr(task, "watched", ())
    trained = names[: len(names) - len(watched)]
    own = trained if trained == ("loss",) else (f"loss/{name}" for name in trained)
    return (*own, *(f"watched/{name}" for name in watched))


class Summarizing(Task, Protocol):
    """A task whose `measure` returns a row for each sample."""

    def summarize(self, rows: Mapping[str, torch.Tensor]) -> Mapping[str, float]:
        """Returns metrics of the evaluation set from all its rows, in the samples' order, on the CPU."""


@runtime_checkable
class Deriving(Protocol):
    """A task with figures that follow from metrics, such as perplexity from the loss.

    Attributes:
        beside: Metrics that a run's proof leaves out: runs from before they were measured have none.
    """

    beside: tuple[str, ...]

    def derived(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Returns the figures for a row of all sets' metrics; a run's proof holds the metrics alone."""


@runtime_checkable
class Checked(Protocol):
    """A task with checks that run once, before the ranks start."""

    def check(self) -> None:
        """Raises BadInputError for bad input that opening the data doesn't find."""


@runtime_checkable
class Extensible(Protocol):
    """A task that can be evaluated on other data sets than its own."""

    def more_data(self, data: DataConfig, split: str | None) -> Dataset:
        """Opens another data set for evaluation.

        Args:
            data: Its format and path.
            split: The split to open; None: the evaluation split.

        Raises:
            BadInputError: If it is missing, or has other classes, tokens or fields than the task's own.
        """
