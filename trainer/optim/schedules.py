"""Schedules of the learning rate.

Each of `constant`, `cosine`, `step`, `wsd` and `one_cycle` returns fractions of the peak, one for each update
in `after`: the updates after the warm-up, counted from the start of the run.
"""

import math

from trainer.config.optimizers import SCHEDULES
from trainer.config.registry import named
from trainer.config.training import OptimConfig


def schedule(config: OptimConfig, updates: int, steps_per_epoch: float) -> list[float]:
    """Returns the learning rate of each update; that of update n is torch's after n calls of step().

    Updates count from 0. W is the number of warm-up updates (`warmup_steps`; below 1 a fraction, rounded).

    - The warm-up is LinearLR(start_factor=1/W, total_iters=W-1): 1/W of the peak to the peak.
    - constant: ConstantLR(factor=1).
    - cosine (Loshchilov and Hutter, 2017): CosineAnnealingLR(T_max=updates-W), so the last update is one
      step above `final_lr`.
    - step (He et al., 2016): MultiStepLR, milestones rounded up to whole updates and counted from the start.
    - one-cycle (Smith and Topin, 2018): OneCycleLR(pct_start=W/updates) with cosine sides, from 1/25 of the
      peak to 1/25/1e4, or to `final_lr` where that is more; the momentum is not cycled. Its peak lies
      between two updates if a fractional `warmup_steps` isn't a whole number. It has no other warm-up.
    - wsd (Hu et al., 2024, MiniCPM), which torch lacks: constant, then 1 - sqrt (Hägele et al., 2024)
      over the last `decay` of all updates, or over those after the warm-up if they are fewer.

    Args:
        config: Peak, schedule and warm-up.
        updates: Number of updates of the run.
        steps_per_epoch: Steps in an epoch, the unit of `milestones`; fractional if a step may have samples of
            two epochs.

    Returns:
        One learning rate for each update: the peak times the schedule's fraction.
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
    """Returns 1, the peak, for every update."""
    return [1.0] * len(after)


def cosine(config: OptimConfig, after: range, steps_per_epoch: float) -> list[float]:  # noqa: ARG001
    """Returns half a cosine from 1, the peak, towards `final_lr`, which is a fraction of the peak too."""
    return _down_to(config.final_lr, [_half_cosine(number / len(after)) for number in range(len(after))])


def step(config: OptimConfig, after: range, steps_per_epoch: float) -> list[float]:
    """Returns fractions that begin at 1 and are multiplied by `gamma` at each milestone."""
    # Rounded, as 0.55 epochs of 100 steps are 55.00000000000001.
    milestones = [round(epochs * steps_per_epoch, 6) for epochs in config.milestones]
    return [float(config.gamma ** sum(update >= milestone for milestone in milestones)) for update in after]


def wsd(config: OptimConfig, after: range, steps_per_epoch: float) -> list[float]:  # noqa: ARG001
    """Returns 1, the peak, and over the last updates 1 - sqrt(progress), scaled to end towards `final_lr`."""
    length = max(1, min(round(config.decay * after.stop), len(after)))
    start = after.stop - length
    left = [1 - math.sqrt(max(0, update - start) / length) for update in after]
    return _down_to(config.final_lr, left)


def one_cycle(config: OptimConfig, after: range, steps_per_epoch: float) -> list[float]:  # noqa: ARG001
    """Returns half a cosine up to the peak, and another one down; `after` has all updates of the run."""
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
    """Maps fractions from [0, 1] to [final, 1]."""
    return [final + (1 - final) * fraction for fraction in left]


def _half_cosine(fraction: float) -> float:
    """Returns half a cosine at a fraction of its length: 1 at 0, 0 at 1."""
    return (1 + math.cos(math.pi * fraction)) / 2
