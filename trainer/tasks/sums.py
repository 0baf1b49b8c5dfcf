"""Sums over the samples of a micro-batch, to which its padding adds nothing."""

from collections.abc import Mapping

import torch
from torch.nn import functional as F

from trainer.data.loader import Batch

_TOP = 5


def weighted_sum(each: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Of a number for each sample, float (n,): float ()."""
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
    """Of logits (n, classes) and labels (n,), each sample times its share (n,)."""
    if batch.weight is None and share is None:
        return F.cross_entropy(logits, label, reduction="sum", label_smoothing=smoothing)
    each = F.cross_entropy(logits, label, reduction="none", label_smoothing=smoothing)
    return weighted_sum(each if share is None else each * share, batch)


def classified(logits: torch.Tensor, label: torch.Tensor, batch: Batch) -> Mapping[str, torch.Tensor]:
    """Of logits (n, classes): loss, and right answers (`accuracy`; `top5` of more than five)."""
    label = label.to(torch.int64)[:, None]
    true = logits.gather(1, label)
    # Of equal logits the first class wins, as in argmax and in every top k; with a NaN no answer is right.
    earlier = torch.arange(logits.shape[1], device=logits.device) < label
    place = ((logits > true) | ((logits == true) & earlier)).sum(1)
    place = torch.where(logits.isnan().any(1), logits.shape[1], place)
    right = {"accuracy": place < 1}
    if logits.shape[1] > _TOP:
        right["top5"] = place < _TOP
    if batch.weight is not None:
        right = {name: each & (batch.weight > 0) for name, each in right.items()}
    return {
        "loss": cross_entropy(logits, label[:, 0], batch),
        **{name: each.sum() for name, each in right.items()},
    }
