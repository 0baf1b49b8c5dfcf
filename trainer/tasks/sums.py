"""Sums over the samples of a micro-batch, to which its padding adds nothing."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch.nn import functional as F

from trainer.data.loader import Batch


class Metric(NamedTuple):
    """Metric of a classifier, besides its loss.

    Attributes:
        of: Gives a number or a truth for each sample, (n,), of logits (n, classes) and labels (n,); its mean
            over the samples is the metric.
        classes: Least number of classes for it to say something.
    """

    of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    classes: int = 2


def _within(most: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Whether the right class is among the `most` likeliest.

    Of equal logits the first class wins, as in argmax, for each `most` alike; with a NaN none is right.
    """

    def within(logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        label = label.to(torch.int64)[:, None]
        true = logits.gather(1, label)
        earlier = torch.arange(logits.shape[1], device=logits.device) < label
        before = ((logits > true) | ((logits == true) & earlier)).sum(1)
        return (before < most) & ~logits.isnan().any(1)

    return within


# By the name that rows have, of classification and of audio.
METRICS = {
    "accuracy": Metric(_within(1), classes=1),
    "top5": Metric(_within(5), classes=6),
}


def weighted_sum(each: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Weighted sum of a number for each sample: float (n,) to float ()."""
    if batch.weight is None:
        return each.sum()
    # where, not a product: whatever the padding gives (an infinity too) counts for nothing.
    return torch.where(batch.weight > 0, each * batch.weight, 0.0).sum()


def cross_entropy(
    logits: torch.Tensor,
    label: torch.Tensor,
    batch: Batch,
    smoothing: float = 0.0,
    share: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cross-entropy of logits (n, classes) and labels (n,), each sample times its share (n,)."""
    if batch.weight is None and share is None:
        return F.cross_entropy(logits, label, reduction="sum", label_smoothing=smoothing)
    each = F.cross_entropy(logits, label, reduction="none", label_smoothing=smoothing)
    return weighted_sum(each if share is None else each * share, batch)


def classified(logits: torch.Tensor, label: torch.Tensor, batch: Batch) -> Mapping[str, torch.Tensor]:
    """Loss and `METRICS` of logits (n, classes)."""
    sums = {"loss": cross_entropy(logits, label, batch)}
    for name, metric in METRICS.items():
        if logits.shape[1] >= metric.classes:
            each = metric.of(logits, label)
            if each.dtype != torch.bool:
                each = weighted_sum(each, batch)
            elif batch.weight is not None:
                each = each & (batch.weight > 0)
            sums[name] = each.sum()
    return sums
