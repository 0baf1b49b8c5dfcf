"""Consensus of the ranks, about once a second: whether to stop or finish, and to write a checkpoint.

A signal may reach one rank alone, and clocks differ, but all ranks must stop after the same step. So every
few steps one all-reduce (MAX, on the CPU) takes four numbers from each rank: its signal, whether a
checkpoint is due, its time per step, whose maximum sets the interval on every rank, and whether a hook asked
to finish. It is started at the end of a step and read at the end of the next, so that hardly any rank waits
for it.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import distributed as dist

from trainer.observe.phases import communicating, enter_phase

SECONDS_BETWEEN = 1.0
# With steps longer than this, the collective is waited for at once: its time is nothing beside a step's, and
# the stop comes a step sooner.
_LONG_STEP_SECONDS = 0.1
_MOST_STEPS = 10_000  # between two collectives


class StopDecision(NamedTuple):
    """Decision of all ranks at the end of a step.

    Attributes:
        signal: Number of the signal that asks for a stop, the highest of all ranks'; 0: none.
        save: True if a periodic checkpoint is due on any rank.
        finish: True if a hook of any rank asked to finish.
    """

    signal: int
    save: bool
    finish: bool = False


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
        self._last_start_step, self._next_start_step = step, step + 1
        self._clock = time.monotonic()
        self._reduced = torch.zeros(4, dtype=torch.float64)
        self._under_way: dist.Work | None = None

    def after(self, step: int, signal: int, save: bool, asked: Sequence[str] = ()) -> StopDecision:
        """Returns the ranks' decision; to be called by all ranks after every step.

        Args:
            step: Number of completed steps.
            signal: Number of a signal that this rank got; 0: none.
            save: True if a periodic checkpoint is due by this rank's clock.
            asked: Names of this rank's hooks that asked to finish.

        Returns:
            The same on every rank; `NOTHING` after steps at which no all-reduce is read.
        """
        if self._group is None:
            return StopDecision(signal, save, bool(asked)) if signal or save or asked else NOTHING
        if self._under_way is not None:
            return self._read(step)
        if step < self._next_start_step:
            return NOTHING
        now = time.monotonic()
        per_step = (now - self._clock) / (step - self._last_start_step)
        self._clock, self._last_start_step = now, step
        self._reduced.copy_(
            torch.tensor([float(signal), float(save), per_step, float(bool(asked))], dtype=torch.float64)
        )
        self._under_way = dist.all_reduce(self._reduced, dist.ReduceOp.MAX, self._group, async_op=True)
        # `_long_steps` is equal on every rank: it follows from the last all-reduce.
        return self._read(step) if self._long_steps else NOTHING

    _long_steps = False

    def _read(self, step: int) -> StopDecision:
        """Waits for the all-reduce, sets the step of the next one, and returns the decision."""
        assert self._under_way is not None
        before = communicating()
        self._under_way.wait()
        enter_phase(before)
        self._under_way = None
        signal, save, per_step, finish = self._reduced.tolist()
        self._long_steps = per_step > _LONG_STEP_SECONDS
        self._next_start_step = step + min(_MOST_STEPS, max(1, round(SECONDS_BETWEEN / max(per_step, 1e-9))))
        return StopDecision(int(signal), save > 0, finish > 0)
