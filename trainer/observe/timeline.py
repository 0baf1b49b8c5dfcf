"""Time of a training by phase: seconds in the host's phases and in the device's.

On a CPU the phases of `observe.phases` say it all. On a GPU the host only starts what the device does later.
There the marks of some steps are left in the stream as events, and read when they are over, without waiting
for them: the time between two is what the device spent in that phase, waiting included. So an input
pipeline that is too slow shows as time in "data" exactly where the device stood still for it. The first
steps, which load libraries and compile, are all marked, and stand for themselves alone.
"""

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from trainer.observe.phases import PHASE_TIMER, PHASES, Phase

SAMPLED_EVERY = 4  # steps; about 3 us for each event, so below 10 us a step
FIRST = 8  # steps of an attempt that are unlike the others
_RING = 4096
# The host waits in these for what it started, or does them itself: its own clock is right.
OF_HOST: tuple[Phase, ...] = ("start", "evaluation", "logging", "checkpoint", "end")
OF_DEVICE = tuple(phase for phase in PHASES if phase not in OF_HOST)


class Event(Protocol):
    """The part of `torch.cuda.Event` that is used here."""

    def record(self) -> None:
        """Leaves it in the current stream."""

    def query(self) -> bool:
        """Returns True if the device has reached the event."""
        ...

    def elapsed_time(self, end_event: "Event") -> float:
        """Milliseconds from this event to another."""
        ...


def _cuda_event() -> Event:
    event: Event = torch.cuda.Event(enable_timing=True)
    return event


class DeviceTimes(NamedTuple):
    """Seconds of the device in each phase of the sampled steps, how many these were, and how far behind.

    `caught_up` of them had the device at the backward pass already when the host had only just started it
    all: there the device waits for the host. `first` and `first_steps` are of steps that stand for no others.
    """

    seconds: Mapping[Phase, float]
    steps: int
    caught_up: int
    first: Mapping[Phase, float] = {}
    first_steps: int = 0


class DeviceTimeline:
    """The marks of the first steps and of every fourth one, in the device's stream."""

    def __init__(
        self, make_event: Callable[[], Event] = _cuda_event, every: int = SAMPLED_EVERY, first: int = FIRST
    ) -> None:
        """Starts with none."""
        self._make, self._every = make_event, every
        self._begin, self._first = first, first  # of the first steps: still to be marked, and to be read
        self._free: list[Event] = []
        self._open: list[tuple[Phase, Event]] = []
        self._closed: deque[tuple[list[tuple[Phase, Event]], bool]] = deque()

    def __call__(self, phase: Phase) -> None:
        """A mark: to be set as `PHASE_TIMER.on_device`."""
        if not self._open and (phase != "data" or (PHASE_TIMER.step % self._every and not self._begin)):
            return
        if len(self._open) + sum(len(events) for events, _ in self._closed) >= _RING:
            self._free.extend(event for _, event in self._open)
            self._open = []
            return  # rows are far apart: what is there already is enough
        event = self._free.pop() if self._free else self._make()
        event.record()
        self._open.append((phase, event))
        if phase in OF_HOST:
            middle = [event for name, event in self._open if name == "backward"]
            self._closed.append((self._open, bool(middle) and middle[-1].query()))
            self._open = []
            self._begin = max(0, self._begin - 1)

    def read(self) -> DeviceTimes:
        """Returns the time of phases that ended since the last call; never waits."""
        seconds: dict[Phase, float] = dict.fromkeys(OF_DEVICE, 0.0)
        first = seconds.copy()
        steps = caught_up = first_steps = 0
        while self._closed and self._closed[0][0][-1][1].query():
            events, early = self._closed.popleft()
            into = first if self._first else seconds
            for (phase, event), (_, following) in itertools.pairwise(events):
                into[phase] += event.elapsed_time(following) / 1e3
            self._free.extend(event for _, event in events)
            if self._first:
                self._first, first_steps = self._first - 1, first_steps + 1
            else:
                steps, caught_up = steps + 1, caught_up + early
        return DeviceTimes(seconds, steps, caught_up, first, first_steps)


class ClockReading(NamedTuple):
    """A point in time: the wall's seconds, the host's seconds in each phase until then, and steps done."""

    wall: float
    host: Mapping[Phase, float]
    step: int


def clock_reading(step: int) -> ClockReading:
    """Now, after so many steps."""
    host = {phase: spent / 1e9 for phase, spent in PHASE_TIMER.read().items()}
    return ClockReading(time.perf_counter(), host, step)


def split_between(
    start: ClockReading, end: ClockReading, device: DeviceTimes | None = None
) -> dict[str, float]:
    """Splits the wall time between two readings by phase.

    Args:
        device: What the device said of the steps between, on a GPU.

    Returns:
        Seconds: `time/wall`, and for each phase `time/<phase>`; they add up to it with `time/unexplained`.
    """
    wall = end.wall - start.wall
    spent = {phase: end.host[phase] - start.host[phase] for phase in PHASES}
    if device is not None and (device.steps or device.first_steps):
        room = max(0.0, wall - sum(spent[phase] for phase in OF_HOST))
        others = max(0, end.step - start.step - device.first_steps)
        scale = others / device.steps if device.steps else 0.0
        on_device = {p: device.first.get(p, 0.0) + device.seconds[p] * scale for p in OF_DEVICE}
        measured = sum(on_device.values())
        # The sampled steps may have been slower than the rest: no more can be explained than there was.
        most = min(1.0, room / measured) if measured else 0.0
        spent.update({phase: seconds * most for phase, seconds in on_device.items()})
    metrics: dict[str, float] = {f"time/{phase}": seconds for phase, seconds in spent.items()}
    if device is not None and device.steps:
        metrics["gpu/caught_up"] = device.caught_up / device.steps
    return {"time/wall": wall, **metrics, "time/unexplained": wall - sum(spent.values())}


def straggler(table: Sequence[Sequence[float]], wall: float) -> dict[str, float | str]:
    """The rank that the others waited for most.

    Args:
        table: Seconds of each rank (rows) in each of `PHASES`.
        wall: Seconds between two metrics records.

    Returns:
        `slow_rank`, `slow_phase` (in which it spent more than the others), and `slow_excess`: how much longer
        than the median of the others it did anything but wait for them, as a fraction of the wall time.
    """
    waits = PHASES.index("communication")
    own = [sum(row) - row[waits] for row in table]
    slow = max(range(len(own)), key=own.__getitem__)
    others = [row for rank, row in enumerate(table) if rank != slow]
    excess = own[slow] - statistics.median(sum(row) - row[waits] for row in others)
    usual = [statistics.median(column) for column in zip(*others, strict=True)]
    more = [mine - theirs for mine, theirs in zip(table[slow], usual, strict=True)]
    more[waits] = -1.0
    phase = PHASES[max(range(len(more)), key=more.__getitem__)]
    return {"slow_rank": slow, "slow_phase": phase, "slow_excess": max(0.0, excess / max(wall, 1e-9))}
