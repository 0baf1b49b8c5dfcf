"""Which workers and prefetch load fastest: a search of at most eight settings, whatever measures them.

Speeds come from a machine that does other things, too. So settings are measured in turns, in several rounds
that each begin with another one, and one that is a little slower than the best is as good: of all that lie
within the spread of the best the one that is nearest to the rule's is taken.
"""

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from trainer.data.fit import Loading

MOST_SETTINGS = 8
REPEATS = 3
PREFETCHES = (1, 2, 4)
# Where the machine is busy, the spread of three turns is wide enough for anything.
_MOST_LOSS = 0.05

Speeds = dict[Loading, list[float]]


class TimeIsUp(Exception):  # noqa: N818  (an end, not an error)
    """There is no time for another measurement."""


@dataclass(frozen=True)
class Grid:
    """What may be chosen.

    Attributes:
        start: What the rule says.
        workers: In ascending order; `start`'s is among them.
        prefetches: Likewise.
        fits: Whether the box can hold a setting.
        needs: Bytes of a setting.
    """

    start: Loading
    workers: Sequence[int]
    prefetches: Sequence[int]
    fits: Callable[[Loading], bool]
    needs: Callable[[Loading], int]

    def distance(self, setting: Loading) -> tuple[int, int]:
        """Steps from the start; among equals what needs less memory."""
        steps = abs(self.workers.index(setting.workers) - self.workers.index(self.start.workers))
        if setting.workers:  # without workers nothing is prepared ahead
            steps += abs(self.prefetches.index(setting.prefetch) - self.prefetches.index(self.start.prefetch))
        return steps, self.needs(setting)

    def all(self) -> list[Loading]:
        """Every setting that fits, nearest first; without workers there is one."""
        settings = [Loading(w, p) for w in self.workers if w for p in self.prefetches]
        settings += [Loading(0, self.start.prefetch)] if 0 in self.workers else []
        return sorted((s for s in settings if self.fits(s)), key=self.distance)


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        choice: The setting to take.
        speeds: Steps per second of each setting, turn by turn.
        failed: Settings that were left out.
    """

    choice: Loading
    speeds: Speeds = field(default_factory=dict)
    failed: tuple[Loading, ...] = ()


def worker_counts(most: int, start: int, given: bool) -> list[int]:
    """None, one, and quarters of the share; or only what was given."""
    return (
        [start] if given else sorted({0, min(1, most), *(round(most * q / 4) for q in (1, 2, 3, 4)), start})
    )


def search(grid: Grid, measure: Callable[[Loading], float | None], most: int = MOST_SETTINGS) -> Found:
    """Tries all of a small grid; else along the workers, then along the prefetch, then beside the best.

    Args:
        grid: What may be chosen.
        measure: Steps per second of a setting, None if it can't be used; raises `TimeIsUp`.
        most: How many settings may be measured.
    """
    speeds: Speeds = {}
    failed: set[Loading] = set()
    best = grid.start
    small = len(grid.all()) <= most
    for axis in (_everything,) if small else (_other_workers, _other_prefetches, _neighbours):
        new = [s for s in sorted(axis(grid, best), key=grid.distance) if s not in speeds and grid.fits(s)]
        new = new[: most - len(speeds.keys() | failed | {best})]
        if not new or (not best.workers and axis is _other_prefetches):
            continue
        turns, whole = _take_turns([best, *new], measure, failed)
        for setting, series in turns.items():
            speeds.setdefault(setting, []).extend(series)
        if turns:
            best = choose(grid, {s: series for s, series in turns.items() if s not in failed})
        if not whole:
            break
    return Found(best, speeds, tuple(sorted(failed)))


def choose(grid: Grid, speeds: Mapping[Loading, Sequence[float]]) -> Loading:
    """Of the settings within the spread of the fastest the one nearest to the rule's."""
    if not speeds:
        return grid.start
    fastest = max(speeds, key=lambda setting: statistics.median(speeds[setting]))
    return min(within_spread(speeds, fastest), key=grid.distance)


def within_spread(speeds: Mapping[Loading, Sequence[float]], fastest: Loading) -> list[Loading]:
    """Settings whose median speed is one that the fastest had, too, and not much below its median."""
    floor = max(min(speeds[fastest]), (1 - _MOST_LOSS) * statistics.median(speeds[fastest]))
    return [setting for setting, series in speeds.items() if statistics.median(series) >= floor]


def _take_turns(
    settings: Sequence[Loading], measure: Callable[[Loading], float | None], failed: set[Loading]
) -> tuple[Speeds, bool]:
    """Speeds by interleaved rounds, of whole rounds only; and whether there was time for all of them."""
    speeds: Speeds = {}
    for number in range(REPEATS):
        this: dict[Loading, float] = {}
        for offset in range(len(settings)):
            setting = settings[(number + offset) % len(settings)]
            if setting in failed:
                continue
            try:
                speed = measure(setting)
            except TimeIsUp:
                # One round has no spread.
                return (speeds if number > 1 else {}), False
            if speed is None:
                failed.add(setting)
                speeds.pop(setting, None)
                this.pop(setting, None)
            else:
                this[setting] = speed
        for setting, speed in this.items():
            speeds.setdefault(setting, []).append(speed)
    return speeds, True


def _everything(grid: Grid, _: Loading) -> Collection[Loading]:
    return grid.all()


def _other_workers(grid: Grid, best: Loading) -> Collection[Loading]:
    return _with_room(grid, grid.workers, best.prefetch)


def _other_prefetches(grid: Grid, best: Loading) -> Collection[Loading]:
    return [Loading(best.workers, prefetch) for prefetch in grid.prefetches]


def _neighbours(grid: Grid, best: Loading) -> Collection[Loading]:
    at = grid.workers.index(best.workers)
    # Without workers every prefetch is the same, and was measured.
    beside = [workers for workers in grid.workers[max(0, at - 1) : at + 2] if workers]
    return _with_room(grid, beside, best.prefetch)


def _with_room(grid: Grid, counts: Sequence[int], prefetch: int) -> Collection[Loading]:
    """Numbers of workers with that prefetch, or less where the box can't hold that."""
    lower = [less for less in grid.prefetches if less <= prefetch]
    settings = ([Loading(workers, less) for less in lower] for workers in counts)
    return [max(room) for each in settings if (room := [setting for setting in each if grid.fits(setting)])]
