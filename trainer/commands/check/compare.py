"""What differs first between two trainings, by more than rounding explains."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trainer.commands.check.plain import Snapshot
from trainer.data.sampling.plan import Plan

_ULPS = 256  # of a tensor's largest value: sums of other order in the few steps that are compared
_SPREADS = 32  # times what the plain loop itself differs by from weights moved by one unit in the last place


@dataclass(frozen=True)
class Difference:
    """A tensor that isn't what it should be.

    Attributes:
        tensor: Its name: loss, lr, model/NAME, optimizer/NAME/SLOT, ema/NAME, metric/NAME.
        step: After which it was seen, from 1.
        by: The largest difference of its values.
        bound: The largest that rounding explains.
        values: That of the one, and of the other.
    """

    tensor: str
    step: int
    by: float
    bound: float
    values: tuple[float, float]

    def __str__(self) -> str:
        """In words."""
        one, other = self.values
        return f"{self.tensor} after step {self.step}: {one:.8g} instead of {other:.8g}"


@dataclass(frozen=True)
class Compared:
    """Two trainings, compared.

    Attributes:
        first: The first difference, or None.
        largest: The largest difference of all tensors, as a share of the tensor's largest value.
        bound: The largest bound, as such a share.
    """

    first: Difference | None
    largest: float
    bound: float


def compare(
    found: Sequence[Snapshot],
    wanted: Sequence[Snapshot],
    nudged: Sequence[Snapshot] | None = None,
    eps: float = 0.0,
    begin: int = 0,
) -> Compared:
    """Compares step by step: loss and rate first, then weights and buffers, moments, average, metrics.

    The bound of a tensor follows from the plain loop alone: what it differs by from a run whose weights began
    one unit in the last place away, 32 times; at least 256 units in the last place of its largest value.

    Args:
        nudged: That run; None: the bits are to be the same.
        eps: Of the numbers that both compute with.
        begin: Steps that are left out.
    """
    largest = loosest = 0.0
    first = None
    for step in range(begin, len(wanted)):
        ours, theirs = found[step] if step < len(found) else {}, wanted[step]
        odd = [name for name in (*theirs, *ours) if (name in ours) is not (name in theirs)]
        for name in (*odd, *(name for name in theirs if name in ours)):
            if name in odd:
                nan = float("nan")
                first = first or Difference(
                    name, step + 1, nan, 0.0, (nan, 0.0) if name in theirs else (0.0, nan)
                )
                continue
            one, other = _numbers(ours[name]), _numbers(theirs[name])
            scale = float(np.abs(other).max(initial=0.0))
            if one.shape != other.shape:
                first = first or Difference(name, step + 1, float("inf"), 0.0, (one.size, other.size))
                continue
            if np.array_equal(one, other, equal_nan=True):
                continue
            bound = 0.0
            if nudged is not None:
                spread = np.abs(_numbers(nudged[step][name]) - other).max(initial=0.0)
                bound = _SPREADS * float(spread)
                if theirs[name].is_floating_point() or theirs[name].is_complex():
                    bound = max(bound, _ULPS * eps * scale)
            apart = np.abs(one - other)
            worst = int(np.argmax(np.where(np.isnan(apart), np.inf, apart)))
            by = float(apart.flat[worst])
            if not by <= bound:
                values = (float(one.flat[worst]), float(other.flat[worst]))
                first = first or Difference(name, step + 1, by, bound, values)
            elif scale:
                largest, loosest = max(largest, by / scale), max(loosest, bound / scale)
    return Compared(first, largest, loosest)


def _numbers(tensor: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return plain.detach().double().numpy()


def odd_order(plan: Plan) -> str:
    """What is wrong with the order of an epoch's samples: each comes once; "" if nothing is."""
    steps = -(-plan.samples // plan.global_batch_size)
    epoch, sample, weight = plan.read(np.arange(steps * plan.micro_batches))
    counts = np.bincount(sample[(weight > 0) & (epoch == 0)].reshape(-1), minlength=plan.samples)
    if plan.last == "drop":
        counts = np.bincount(counts, minlength=2)[2:]  # some are left out, and none comes twice
        return "a sample comes twice in an epoch" if counts.any() else ""
    odd = np.flatnonzero(counts != 1)
    return f"sample {odd[0]} comes {counts[odd[0]]} times in the first epoch" if len(odd) else ""
