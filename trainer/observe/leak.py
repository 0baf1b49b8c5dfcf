"""Does memory grow with every step, and where?

The trend is a Theil-Sen slope (Sen, 1968): the median of the slopes between pairs of points, which a few odd
ones don't move. It counts as a leak only if the growth is steady and exceeds the noise.
"""

import linecache
import sysconfig
import tracemalloc
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from trainer.config.sizes import MIB

_POINTS = 120  # that are compared with each other: 7,140 pairs, some milliseconds
_FEWEST = 12
_LEAST_BYTES = 32 << 20  # a healthy process was seen to creep by 12 MiB: malloc's holes, tracemalloc's own
_NOISE = 4.0  # growth is at least so many times the median distance from the line
_PACE = 0.4  # the slowest part grows at least so much as the fastest
_FRAMES = 12
_STANDARD = sysconfig.get_path("stdlib")

# Keys of a row.
_WHAT = {"memory/rss_bytes": "host memory", "memory/allocated_bytes": "GPU memory"}

_Line = tuple[str, int]


class _Held(NamedTuple):
    blocks: int
    bytes: int


def leak(steps: Sequence[float], sizes: Sequence[float], least: float = _LEAST_BYTES) -> float | None:
    """Bytes per step by which memory grows; None if it doesn't, or too little is known yet.

    The first third of what is known is left out: caches, worker start and the allocator's warm-up grow, too,
    but come to an end. A leak grows in each part of the rest at about the same pace.

    Args:
        steps: At which memory was measured, ascending.
        sizes: Bytes then; one of these for each of those.
        least: Smallest growth in bytes to report.
    """
    start = len(steps) // 3
    stride = max(1, -(-(len(steps) - start) // _POINTS))
    x, y = steps[start::stride], sizes[start::stride]
    if len(x) < _FEWEST or x[-1] <= x[0]:
        return None
    slope = median(
        (y[b] - y[a]) / (x[b] - x[a]) for a in range(len(x)) for b in range(a + 1, len(x)) if x[b] > x[a]
    )
    grown = slope * (x[-1] - x[0])
    level = median(size - slope * step for step, size in zip(x, y, strict=True))
    noise = median(abs(size - slope * step - level) for step, size in zip(x, y, strict=True))
    if grown < max(least, _NOISE * noise):
        return None
    quarter = len(x) // 4
    means = [median(y[part * quarter : (part + 1) * quarter]) for part in range(4)]
    changes = [after - before for before, after in pairwise(means)]
    # A single jump, and what levels out, grow unevenly.
    return slope if min(changes) >= _PACE * max(changes) else None


def leak_text(
    what: str, slope: float, size: float, limit: float | None = None, site: str | None = None
) -> str:
    """Returns one line about a leak.

    Args:
        limit: Bytes at which it ends, if known.
        site: From `Growth.site`, if known.
    """
    pace = f"{slope / MIB:,.2f} MiB" if slope >= MIB / 10 else f"{slope / 1024:,.1f} KiB"
    text = f"{what} grows by {pace} with every step"
    if limit is not None and limit > size:
        text += f" and is full after {(limit - size) / slope:,.0f} more"
    if site is not None:
        return f"{text}; {site}"
    return (
        f"{text}; is something kept of each step, such as a loss without .detach()? "
        "log.tracemalloc=true names the line"
    )


class Trends:
    """A sink that looks for leaks in the memory figures of records."""

    def __init__(self, growth: "Growth | None" = None) -> None:
        """Starts without samples; `growth` is asked to look now and then."""
        self._growth = growth
        self._rows = 0
        self._seen: dict[str, tuple[list[float], list[float]]] = {key: ([], []) for key in _WHAT}

    def __call__(self, row: Mapping[str, float | int | str]) -> None:
        """Takes a record."""
        if row["kind"] != "train":
            return
        self._rows += 1
        for key, (steps, sizes) in self._seen.items():
            if key in row:
                steps.append(float(row["step"]))
                sizes.append(float(row[key]))
        # After the warm-up, and then rarely: a look takes its time.
        if self._growth is not None and self._rows % 8 == 0 and (self._rows // 8).bit_count() == 1:
            self._growth.look()

    def lines(self, limits: Mapping[str, float]) -> list[str]:
        """A line for each leak; takes some milliseconds.

        Args:
            limits: Total bytes, by the key of a record, where known.
        """
        site = None if self._growth is None else self._growth.site()
        return [
            leak_text(_WHAT[key], slope, sizes[-1], limits.get(key), site)
            for key, (steps, sizes) in self._seen.items()
            if (slope := leak(steps, sizes)) is not None
        ]


class Growth:
    """Python's allocations by line, on request: recording slows Python down.

    torch's memory isn't Python's, but each tensor has an object that is: so the line that keeps tensors shows
    up by their number.
    """

    def __init__(self) -> None:
        """Starts recording."""
        tracemalloc.start(_FRAMES)
        self._first = self._middle = self._last = dict[_Line, _Held]()
        self._looks = 0

    def look(self) -> None:
        """Notes what is allocated: at a logging interval, after the warm-up. May take seconds."""
        before, self._last = self._last, _by_line(tracemalloc.take_snapshot())
        self._looks += 1
        if self._looks == 1:
            self._first = self._last
        if (self._looks - 1).bit_count() == 1:  # so it stays between the half and the last look
            self._middle = before

    def site(self) -> str | None:
        """The line whose allocations grew from look to look, and most; None if none did."""
        if self._looks < 3:
            return None
        first, middle, last = self._first, self._middle, self._last
        nothing = _Held(0, 0)
        grown = {
            line: _Held(held.blocks - before.blocks, held.bytes - before.bytes)
            for line, held in last.items()
            if (before := first.get(line, nothing)).blocks < middle.get(line, nothing).blocks < held.blocks
        }
        if not grown:
            return None
        (file, number), more = max(grown.items(), key=lambda item: (item[1].bytes, item[1].blocks))
        code = linecache.getline(file, number).strip()
        return f"{file}:{number} ({code}) keeps {more.blocks:,} blocks more, {more.bytes / 1024:,.0f} KiB"

    def close(self) -> None:
        """Ends recording."""
        tracemalloc.stop()


def _by_line(snapshot: tracemalloc.Snapshot) -> dict[_Line, _Held]:
    """Sums living allocations by the innermost line that isn't a library's."""
    found: dict[_Line, _Held] = {}
    for statistic in snapshot.statistics("traceback"):
        line = _own(statistic.traceback)
        before = found.get(line, _Held(0, 0))
        found[line] = _Held(before.blocks + statistic.count, before.bytes + statistic.size)
    return found


def _own(frames: tracemalloc.Traceback) -> _Line:
    for frame in reversed(frames):  # the innermost first
        if not frame.filename.startswith(("<", _STANDARD)) and "site-packages" not in frame.filename:
            return frame.filename, frame.lineno
    return frames[-1].filename, frames[-1].lineno
