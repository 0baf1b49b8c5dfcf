"""Phases of a rank: the current one, and the time spent in each.

`distributed.watchdog` looks at them to find out who hangs, `observe.timeline` adds up where the time went. To
enter one costs 0.3 us. All ranks enter the same phases in the same order, before and after whatever they do
together: so of ranks that wait for each other, the one with the fewest hangs.
"""

import time
from collections.abc import Callable
from typing import Literal, get_args

Phase = Literal[
    "start",  # until the first step: imports that come late, the loader's workers, a rollback
    "data",  # waiting for a batch, or loading it in this process
    "copy",  # on a GPU: waiting for a batch on its way from the host
    "forward",
    "backward",
    "communication",  # what the computation doesn't hide
    "update",  # clipping, optimizer, average of the weights
    "evaluation",
    "logging",
    "checkpoint",
    "host",  # Python between the others
    "end",
]
PHASES: tuple[Phase, ...] = get_args(Phase)


class PhaseTimer:
    """Timer of a rank's phases, and its position.

    Attributes:
        phase: What it does.
        step: The step that it does, or did last, counted from 1.
        count: Phases entered so far.
        heartbeats: Signs of progress that other ranks don't give, while a checkpoint or answers are written.
        since: When the phase began, as `time.perf_counter_ns` has it.
        spent: Nanoseconds of the host in each phase, without those since then.
        on_device: Called with each phase, to put a mark into the device's stream; None on a CPU.
    """

    __slots__ = ("count", "heartbeats", "on_device", "phase", "since", "spent", "step")

    def __init__(self) -> None:
        self.on_device: Callable[[Phase], None] | None = None
        self.reset()

    def reset(self) -> None:
        """Resets the timer: before the first collective of the ranks."""
        self.phase: Phase = "start"
        self.step = self.count = self.heartbeats = 0
        self.since = time.perf_counter_ns()
        self.spent: dict[Phase, int] = dict.fromkeys(PHASES, 0)

    def read(self) -> dict[Phase, int]:
        """Nanoseconds of the host in each phase, until now."""
        now = time.perf_counter_ns()
        self.spent[self.phase] += now - self.since
        self.since = now
        return self.spent.copy()


_now = time.perf_counter_ns
PHASE_TIMER = PhaseTimer()  # one per process, as there is one training


def enter_phase(phase: Phase) -> None:
    """Enters a phase: what this rank does from here on."""
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
    """Gives a sign of progress: of the thread that writes a checkpoint, or of a rank that others wait for."""
    PHASE_TIMER.heartbeats += 1
