"""Sums over the samples of a micro-batch, without its padding."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch.nn import functional as F

from trainer.data.batch import Batch


class Metric(NamedTuple):
    """Metric of a classifier, in addition to its loss.

    Attributes:
        of: Maps logits (n, classes) and labels (n,) to a number or bool for each sample, (n,), whose mean
            is the metric.
        classes: Smallest number of classes for which it is reported.
    """

    of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    classes: int = 2


def _within(most: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Returns a function that is true where the label is among the `most` largest logits.

    Of equal logits the first class ranks higher, as in argmax; a sample with a NaN counts as wrong.
    """

    def within(logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        label = label.to(torch.int64)[:, None]
        true = logits.gather(1, label)
        earlier = torch.arange(logits.shape[1], device=logits.device) < label
        before = ((logits > true) | ((logits == true) & earlier)).sum(1)
        return (before < most) & ~logits.isnan().any(1)

    return within


# By the key in metrics records; for the tasks classification and audio.
METRICS = {
    "accuracy": Metric(_within(1), classes=1),
    "top5": Metric(_within(5), classes=6),
}


def weighted_sum(each: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Weighted sum of per-sample values: float (n,) to float ()."""
    if batch.weight is None:
        return each.sum()
    # where, not a product: an infinity from the padding must not make the sum a NaN.
    return torch.where(batch.weight > 0, each * batch.weight, 0.0).sum()


def cross_entropy(
    logits: torch.Tensor,
    label: torch.Tensor,
    batch: Batch,
    smoothing: float = 0.0,
    fraction: torch.Tensor | None = None,
) -> torch.Tensor:
    """Summed cross-entropy of logits (n, classes) and labels (n,), each sample times its fraction (n,).

    Where samples may have several classes, labels (n, classes) of 0 and 1: the mean over the classes of the
    cross-entropy of each, by a sigmoid.
    """
    if label.ndim == 2:
        of_class = F.binary_cross_entropy_with_logits(logits, label.to(logits.dtype), reduction="none")
        each = of_class.mean(1)
        return weighted_sum(each if fraction is None else each * fraction, batch)
    if batch.weight is None and fraction is None:
        return F.cross_entropy(logits, label, reduction="sum", label_smoothing=smoothing)
    each = F.cross_entropy(logits, label, reduction="none", label_smoothing=smoothing)
    return weighted_sum(each if fraction is None else each * fraction, batch)


def classified(logits: torch.Tensor, label: torch.Tensor, batch: Batch) -> Mapping[str, torch.Tensor]:
    """Returns the sums of the loss and of `METRICS`, from logits (n, classes) and labels (n,).

    Where samples may have several classes, labels (n, classes), a sample is right where all of them are.
    """
    sums = {"loss": cross_entropy(logits, label, batch)}
    if label.ndim == 2:
        right = ((logits > 0) == label.bool()).all(1) & ~logits.isnan().any(dim=1)
        return {**sums, "accuracy": (right if batch.weight is None else right & (batch.weight > 0)).sum()}
    for name, metric in METRICS.items():
        if logits.shape[1] >= metric.classes:
            each = metric.of(logits, label)
            if each.dtype != torch.bool:
                each = weighted_sum(each, batch)
            elif batch.weight is not None:
                each = each & (batch.weight > 0)
            sums[name] = each.sum()
    return sums
