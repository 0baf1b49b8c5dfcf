"""Consensus of the ranks, about once a second: to stop, and to write a checkpoint.

A signal may reach one rank alone, and clocks differ, but all ranks must stop after the same step. So every
few steps they reduce three numbers in one small collective on the CPU. The interval is agreed in it, too,
from the slowest rank's time per step. It is started at the end of a step and read at the end of the next, so
that no rank waits for it.
"""

import time
from typing import NamedTuple

import torch
from torch import distributed as dist

from trainer.observe.phases import communicating, enter_phase

_SECONDS_BETWEEN = 1.0
# Steps this long aren't slowed down by waiting for the collective at once, and the stop comes a step sooner.
_LONG_STEP_SECONDS = 0.1
_MOST_STEPS = 10_000


class StopDecision(NamedTuple):
    """Decision of all ranks for the end of the current step.

    Attributes:
        signal: Number of the signal that asks for a stop; 0: none.
        save: True if a periodic checkpoint is due.
    """

    signal: int
    save: bool


NOTHING = StopDecision(0, False)


class StopConsensus:
    """Consensus of the ranks; a single rank decides alone."""

    def __init__(self, group: dist.ProcessGroup | None, step: int) -> None:
        """Starts at a step, the same on every rank.

        Args:
            group: Process group for CPU tensors; None for a single rank.
            step: Number of completed steps.
        """
        self._group = group
        self._asked_at = self._ask_at = step + 1
        self._clock = time.monotonic()
        self._wish = torch.zeros(3, dtype=torch.float64)
        self._under_way: dist.Work | None = None

    def after(self, step: int, signal: int, save: bool) -> StopDecision:
        """Returns the decision after a step.

        Returns:
            The same on every rank.
        """
        if self._group is None:
            return StopDecision(signal, save) if signal or save else NOTHING
        if self._under_way is not None:
            return self._read(step)
        if step < self._ask_at:
            return NOTHING
        now = time.monotonic()
        per_step = (now - self._clock) / max(1, step - self._asked_at + 1)
        self._clock, self._asked_at = now, step
        self._wish.copy_(torch.tensor([float(signal), float(save), per_step], dtype=torch.float64))
        self._under_way = dist.all_reduce(self._wish, dist.ReduceOp.MAX, self._group, async_op=True)
        # Equal on every rank, as it was agreed the last time.
        return self._read(step) if self._long_steps else NOTHING

    _long_steps = False

    def _read(self, step: int) -> StopDecision:
        assert self._under_way is not None
        before = communicating()
        self._under_way.wait()
        enter_phase(before)
        self._under_way = None
        signal, save, per_step = self._wish.tolist()
        self._long_steps = per_step > _LONG_STEP_SECONDS
        self._ask_at = step + min(_MOST_STEPS, max(1, round(_SECONDS_BETWEEN / max(per_step, 1e-9))))
        return StopDecision(int(signal), save > 0)
