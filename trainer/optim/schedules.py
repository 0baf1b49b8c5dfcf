"""Schedules of the learning rate: fractions of the peak, one for each update."""

import math

from trainer.config.optimizers import SCHEDULES
from trainer.config.registry import named
from trainer.config.training import OptimConfig


def schedule(config: OptimConfig, updates: int, steps_per_epoch: float) -> list[float]:
    """Learning rate of each update; update n has the rate of torch's scheduler after n calls of its step().

    With W updates of warm-up (`warmup_steps`; a fraction is rounded), and update W the first after it:

    - The warm-up is LinearLR(start_factor=1/W, total_iters=W-1): 1/W of the peak to the peak.
    - constant: ConstantLR(factor=1).
    - cosine (Loshchilov and Hutter, 2017): CosineAnnealingLR(T_max=updates-W), so the last update is one
      step above `final_lr`.
    - step (He et al., 2016): MultiStepLR, milestones rounded up to whole updates and counted from the start.
    - one-cycle (Smith and Topin, 2018): OneCycleLR(pct_start=W/updates) with cosine sides, from 1/25 of the
      peak to 1/25/1e4, or to `final_lr` where that is more; the momentum is not cycled. Its peak lies
      between two updates where a fraction of them isn't whole, and it has its own warm-up.
    - wsd (Hu et al., 2024, MiniCPM), which torch lacks: constant, then 1 - sqrt of Hagele et al., 2024; the
      decay takes what the warm-up leaves, if that is less.

    Args:
        config: Peak, shape and warm-up.
        updates: Number of updates of the run.
        steps_per_epoch: Unit of milestones; fractional if a step may have samples of two epochs.

    Returns:
        `updates` learning rates.
    """
    row = SCHEDULES[config.schedule]
    warmup = 0 if row.warms_up else round(_warmup(config, updates))
    fractions = [(update + 1) / warmup for update in range(min(warmup, updates))]
    if after := range(warmup, updates):
        fractions += named(row.opens)(config, after, steps_per_epoch)
    return [config.lr * fraction for fraction in fractions]


def _warmup(config: OptimConfig, updates: int) -> float:
    """Returns the number of warm-up updates; fractional if configured as a fraction of all."""
    return config.warmup_steps * updates if config.warmup_steps < 1 else config.warmup_steps


def constant(config: OptimConfig, after: range, steps_per_epoch: float) -> list[float]:  # noqa: ARG001
    """Returns the peak for every update."""
    return [1.0] * len(after)


def cosine(config: OptimConfig, after: range, steps_per_epoch: float) -> list[float]:  # noqa: ARG001
    """Returns half a cosine from the peak to `final_lr`."""
    return _down_to(config.final_lr, [_half_cosine(number / len(after)) for number in range(len(after))])


def step(config: OptimConfig, after: range, steps_per_epoch: float) -> list[float]:
    """Returns fractions that are multiplied by `gamma` at each milestone."""
    # Rounded, as 0.55 epochs of 100 steps are 55.00000000000001.
    falls = [round(epochs * steps_per_epoch, 6) for epochs in config.milestones]
    return [float(config.gamma ** sum(update >= fall for fall in falls)) for update in after]


def wsd(config: OptimConfig, after: range, steps_per_epoch: float) -> list[float]:  # noqa: ARG001
    """Returns the peak, then a decay by one minus a square root to `final_lr`."""
    length = max(1, min(round(config.decay * after.stop), len(after)))
    start = after.stop - length
    left = [1 - math.sqrt(max(0, update - start) / length) for update in after]
    return _down_to(config.final_lr, left)


def one_cycle(config: OptimConfig, after: range, steps_per_epoch: float) -> list[float]:  # noqa: ARG001
    """Returns half a cosine up to the peak, and another one down."""
    first, final = 1 / 25, max(config.final_lr, 1 / 25 / 1e4)
    top = _warmup(config, len(after)) - 1  # may be fractional; below 0, torch starts after the peak
    last = len(after) - 1
    return [
        1 + (first - 1) * _half_cosine(update / top)
        if update < top
        else final + (1 - final) * _half_cosine((update - top) / (last - top or 1))
        for update in after
    ]


def _down_to(final: float, left: list[float]) -> list[float]:
    return [final + (1 - final) * fraction for fraction in left]


def _half_cosine(fraction: float) -> float:
    return (1 + math.cos(math.pi * fraction)) / 2
