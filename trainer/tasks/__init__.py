"""Tasks: the model, its loss, and the metrics.

A domain each: classification, detection, language, audio, one's own; and their augmentation. Imports `data`,
`models` and what is below them; knows neither ranks nor the loop. A loss is a sum over a batch's items, never
a mean, so that any split into micro-batches gives the same gradients.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from trainer.config.data import DataConfig
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
        """Returns facts on the data that users of the weights need: for the manifest, so JSON."""
        ...

    def model(self) -> nn.Module:
        """A new model, on the CPU or on the meta device."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The loss of a micro-batch: a sum over its items (never a mean), weighted; float ()."""
        ...

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Returns metrics of a micro-batch of n samples.

        Returns:
            By name, weighted sums over the samples, each (), which are divided by the items of the whole
            set; or a row for each sample, (n, ...), which `summarize` sees all of.
        """
        ...


class Several(Task, Protocol):
    """A task with several losses; its `loss` is the sum of those that are trained.

    Attributes:
        losses: Their names, for rows: `loss/NAME`.
        watched: The last ones of them, which aren't trained; in rows `watched/NAME`.
    """

    losses: tuple[str, ...]
    watched: tuple[str, ...]

    def loss_parts(self, model: nn.Module, batch: Batch) -> Sequence[torch.Tensor]:
        """Each loss of a micro-batch, in the order of `losses`; as `loss`, a sum over the items."""
        ...


def loss_rows(task: object) -> tuple[str, ...]:
    """Returns the names of `Several.losses` in records; () for a task with one loss."""
    names, watched = getattr(task, "losses", ()), getattr(task, "watched", ())
    trained = names[: len(names) - len(watched)]
    own = trained if trained == ("loss",) else (f"loss/{name}" for name in trained)
    return (*own, *(f"watched/{name}" for name in watched))


class Summarizing(Task, Protocol):
    """A task whose `measure` gives rows."""

    def summarize(self, rows: Mapping[str, torch.Tensor]) -> Mapping[str, float]:
        """Metrics of the whole evaluation set from its rows, in the order of the samples, on the CPU."""
        ...


@runtime_checkable
class Deriving(Protocol):
    """A task with figures that follow from metrics, such as perplexity from the loss."""

    def derived(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Returns the figures for a row of all sets' metrics; a run's proof holds the metrics alone."""
        ...


@runtime_checkable
class Checked(Protocol):
    """A task with more to look at before there are ranks than opening its data does."""

    def check(self) -> None:
        """Raises BadInputError, naming what is wrong."""
        ...


@runtime_checkable
class Extensible(Protocol):
    """A task that can be measured on more than its own evaluation data."""

    def more_data(self, data: DataConfig, split: str | None) -> Dataset:
        """Opens another set, to be measured as the task's own is.

        Args:
            data: Where it lies.
            split: Which of its splits; None: the one that is measured on otherwise.

        Raises:
            BadInputError: If it isn't there, has other classes or tokens, or is another kind of data.
        """
        ...
