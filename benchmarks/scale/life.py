"""The life of a job, event by event: it trains, copies a checkpoint, writes it, fails, starts again.

The writer does what `trainer.checkpoint.background` does: training waits for the copy alone; one checkpoint
is written at a time, and a copy that comes sooner holds the training up until the one before is on the disk.
What wasn't on the disk when a node failed is done again.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

_SAME = 1e-9  # cycles that differ by less are the same
_NEVER = float("inf")


class Lived(NamedTuple):
    """Observations of a job's simulated life.

    Attributes:
        lost_share: Share of its time that gave nothing which was kept.
        stall_s: Seconds that a checkpoint held the training up, on average.
        held_up: Whether a copy had to wait for the write before it.
    """

    lost_share: float
    stall_s: float
    held_up: bool


def failure_times(nodes: int, mean_s: float, count: int, random: np.random.Generator) -> list[float]:
    """Seconds of the first failures of any of the nodes; one that failed is replaced at once by a new one."""
    clocks = (mean_s * random.exponential(size=nodes)).tolist()
    heapq.heapify(clocks)
    times = []
    for more in (mean_s * random.exponential(size=count)).tolist():
        times.append(clocks[0])
        heapq.heapreplace(clocks, clocks[0] + more)
    return times


def live(
    interval_s: float,
    copy_s: float,
    write_s: float,
    restart_s: float,
    failures: Sequence[float],
    leap: bool = True,
) -> Lived:
    """Lives until the last failure.

    Args:
        interval_s: Seconds of training between two checkpoints.
        copy_s: Seconds that training waits for the copy.
        write_s: Seconds until the copy is on the disk.
        restart_s: Seconds from a failure until it trains again; a failure in them begins them anew.
        failures: Seconds at which a node fails, rising.
        leap: Whether to leap over checkpoints that are like the two before, up to the last before a failure.
    """
    # At most two events are ahead: what the training does next (never, while a copy waits), the write's end.
    next_at, what = interval_s, "due"
    writing, write_ends = 0.0, _NEVER  # seconds of training in what is written
    copied = kept = held_s = stalled_s = 0.0  # seconds of training in the copy, and on the disk
    waits_since: float | None = None
    checkpoints, waited, written_at, cycle_s = 0, 0.0, 0.0, 0.0
    upcoming = iter(failures)
    failure = next(upcoming)
    while True:
        if failure <= next_at and failure <= write_ends:
            next_at, what, write_ends = failure + restart_s, "restarted", _NEVER
            waits_since, written_at, cycle_s = None, 0.0, 0.0
            end, failure = failure, next(upcoming, -1.0)
            if failure < 0:
                return Lived(1 - kept / end, stalled_s / max(1, checkpoints), held_s > 0)
            continue
        written = write_ends < next_at
        if written:
            now, kept, write_ends = write_ends, writing, _NEVER
            starts = waits_since is not None
        elif what == "due":
            copied += interval_s
            next_at, what = next_at + copy_s, "copied"
            continue
        elif what == "restarted":
            copied = kept
            next_at, what = next_at + interval_s, "due"
            continue
        elif write_ends < _NEVER:
            waits_since, next_at = next_at, _NEVER
            continue
        else:
            now, starts = next_at, True
        if starts:
            waited = 0.0 if waits_since is None else now - waits_since
            held_s, stalled_s, checkpoints = held_s + waited, stalled_s + copy_s + waited, checkpoints + 1
            writing, write_ends, waits_since = copied, now + write_s, None
            next_at, what = now + interval_s, "due"
        if written:
            before, cycle_s = cycle_s, now - written_at
            written_at = now
            if leap and before and abs(cycle_s - before) <= _SAME * cycle_s:
                times = int((failure - now) / cycle_s) - 1
                if times > 0:
                    next_at, write_ends = next_at + times * cycle_s, write_ends + times * cycle_s
                    copied, kept = copied + times * interval_s, kept + times * interval_s
                    writing += times * interval_s
                    written_at += times * cycle_s
                    # Each was like the last one.
                    checkpoints, stalled_s = checkpoints + times, stalled_s + times * (copy_s + waited)


def best_interval(copy_s: float, write_s: float, restart_s: float, failures: Sequence[float]) -> float:
    """The interval at which such a job loses least, found by living with many."""

    def with_interval(seconds: float) -> Lived:
        return live(seconds, copy_s, write_s, restart_s, failures)

    # From one checkpoint between two failures to ever more, until it has become worse twice.
    interval = failures[-1] / len(failures)
    tried = [(with_interval(interval).lost_share, interval)]
    shortest = 0.0
    while len(tried) < 3 or min(tried)[1] in (tried[-1][1], tried[-2][1]):
        interval /= 2
        lived = with_interval(interval)
        if lived.held_up:
            shortest = _shortest(interval, 2 * interval, lambda seconds: with_interval(seconds).held_up)
            break
        tried.append((lived.lost_share, interval))
    around = min(tried)[1]
    around = max(around, shortest)
    intervals = np.geomspace(max(around / 1.9, shortest), around * 1.9, 11)
    losses = [with_interval(float(one)).lost_share for one in intervals]
    # Near its least the loss is a parabola over the logarithm; a fit sees through the noise of the failures.
    square, slope, _ = np.polyfit(np.log(intervals), losses, 2)
    if square <= 0:
        return float(intervals[int(np.argmin(losses))])
    return float(np.clip(np.exp(-slope / (2 * square)), intervals[0], intervals[-1]))


def _shortest(low: float, high: float, held_up: Callable[[float], bool]) -> float:
    """The shortest interval in which no copy has to wait."""
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if held_up(middle) else (low, middle)
    return high
