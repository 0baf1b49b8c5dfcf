"""What the ranks decide together about once a second: whether to stop, and whether to write a checkpoint.

A signal reaches one rank and not the others, and clocks differ; but all ranks must stop after the same
window. So a few numbers go round in one small collective on the CPU, every so many windows. How many is
agreed in it too, from the slowest rank's time per window; it is started at the end of a window and read at
the end of the next, so that nobody waits for it.
"""

import time
from typing import NamedTuple

import torch
from torch import distributed as dist

from trainer.observe.phases import communicating, mark

_SECONDS_BETWEEN = 1.0
# Windows this long aren't slowed down by waiting for the collective; and a stop then comes a window sooner.
_LONG_WINDOW_SECONDS = 0.1
_MOST_WINDOWS = 10_000


class Decision(NamedTuple):
    """What all ranks do after the window that they are at.

    Attributes:
        signal: The signal that asks for a stop, as a number; 0: none.
        save: Whether to write a checkpoint because it is time.
    """

    signal: int
    save: bool


NOTHING = Decision(0, False)


class Agreement:
    """The ranks' side of it; alone there is nobody to ask."""

    def __init__(self, group: dist.ProcessGroup | None, window: int) -> None:
        """Starts at a window, the same on every rank.

        Args:
            group: A process group for CPU tensors; None for a single rank.
            window: Windows done.
        """
        self._group = group
        self._asked_at = self._ask_at = window + 1
        self._clock = time.monotonic()
        self._wish = torch.zeros(3, dtype=torch.float64)
        self._under_way: dist.Work | None = None

    def after(self, window: int, signal: int, save: bool) -> Decision:
        """What to do after a window.

        Args:
            window: Windows done; each is asked about once, in order.
            signal: The signal that this rank got, or 0.
            save: Whether this rank finds that it is time for a checkpoint.

        Returns:
            The same on every rank.
        """
        if self._group is None:
            return Decision(signal, save) if signal or save else NOTHING
        if self._under_way is not None:
            return self._read(window)
        if window < self._ask_at:
            return NOTHING
        now = time.monotonic()
        per_window = (now - self._clock) / max(1, window - self._asked_at + 1)
        self._clock, self._asked_at = now, window
        self._wish.copy_(torch.tensor([float(signal), float(save), per_window], dtype=torch.float64))
        self._under_way = dist.all_reduce(self._wish, dist.ReduceOp.MAX, self._group, async_op=True)
        # The same on every rank, for it was agreed the last time.
        return self._read(window) if self._long_windows else NOTHING

    _long_windows = False

    def _read(self, window: int) -> Decision:
        assert self._under_way is not None
        before = communicating()
        self._under_way.wait()
        mark(before)
        self._under_way = None
        signal, save, per_window = self._wish.tolist()
        self._long_windows = per_window > _LONG_WINDOW_SECONDS
        self._ask_at = window + min(_MOST_WINDOWS, max(1, round(_SECONDS_BETWEEN / max(per_window, 1e-9))))
        return Decision(int(signal), save > 0)
