"""Phases of a rank: the current one, and the time spent in each.

`distributed.watchdog` compares the ranks' phases to find the one that hangs, `observe.timeline` adds up the
time in each. Entering one costs 0.3 us. All ranks enter the same phases in the same order, before and after
each collective: so of ranks that wait for each other, the one that has entered the fewest phases hangs.
"""

import time
from collections.abc import Callable
from typing import Literal, get_args

Phase = Literal[
    "start",  # until the first step: lazy imports, starting loader workers
    "data",  # waiting for a batch, or loading it in this process
    "copy",  # on a GPU: waiting for a batch on its way from the host
    "forward",
    "backward",
    "communication",  # collectives that don't overlap with computation
    "update",  # clipping, optimizer, average of the weights
    "evaluation",
    "logging",
    "checkpoint",
    "host",  # Python between the other phases
    "end",
]
PHASES: tuple[Phase, ...] = get_args(Phase)


class PhaseTimer:
    """Current phase and step of a rank, and the time spent in each phase.

    Attributes:
        phase: The current phase.
        step: The current step, or between steps the last one, counted from 1; 0 before the first.
        count: Number of phases entered so far.
        heartbeats: Number of signs of progress within a phase, given by a rank that others wait for.
        since: Time up to which `spent` counts, in ns of `time.perf_counter_ns`.
        spent: Nanoseconds in each phase until `since`, by the host's clock.
        on_device: Called with each phase that is entered, to record it in the device's stream; None on a CPU.
    """

    __slots__ = ("count", "heartbeats", "on_device", "phase", "since", "spent", "step")

    def __init__(self) -> None:
        self.on_device: Callable[[Phase], None] | None = None
        self.reset()

    def reset(self) -> None:
        """Resets all but `on_device`, before the first collective of the ranks."""
        self.phase: Phase = "start"
        self.step = self.count = self.heartbeats = 0
        self.since = time.perf_counter_ns()
        self.spent: dict[Phase, int] = dict.fromkeys(PHASES, 0)

    def read(self) -> dict[Phase, int]:
        """Returns the nanoseconds spent in each phase until now, by the host's clock."""
        now = time.perf_counter_ns()
        self.spent[self.phase] += now - self.since
        self.since = now
        return self.spent.copy()


_now = time.perf_counter_ns
PHASE_TIMER = PhaseTimer()  # one per process, as a process trains one run at a time


def enter_phase(phase: Phase) -> None:
    """Enters a phase; the time until now counts for the phase before."""
    timer, now = PHASE_TIMER, _now()
    timer.spent[timer.phase] += now - timer.since
    timer.since = now
    timer.phase = phase
    timer.count += 1
    if timer.on_device is not None:
        timer.on_device(phase)


def communicating() -> Phase:
    """Enters "communication", before a wait for the other ranks; returns the phase to enter after it."""
    before = PHASE_TIMER.phase
    enter_phase("communication")
    return before


def heartbeat() -> None:
    """Counts a sign of progress within a phase, such as of the thread that writes a checkpoint."""
    PHASE_TIMER.heartbeats += 1
