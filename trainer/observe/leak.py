"""Leaks: memory that grows with every step.

The trend is a Theil-Sen slope (Sen, 1968): the median of the slopes between pairs of points, which a few odd
ones don't move. It counts as a leak only if the growth is steady and exceeds the noise.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

from trainer.config.sizes import MIB

_POINTS = 120  # that are compared with each other: 7,140 pairs, some milliseconds
_FEWEST = 12
_LEAST_BYTES = 32 << 20  # a healthy process was seen to creep by 12 MiB: malloc's holes
_NOISE = 4.0  # growth is at least so many times the median distance from the line
_PACE = 0.4  # the slowest part grows at least so much as the fastest

# Keys of a metrics record.
_WHAT = {"memory/rss_bytes": "host memory", "memory/allocated_bytes": "GPU memory"}


def leak(steps: Sequence[float], sizes: Sequence[float], least: float = _LEAST_BYTES) -> float | None:
    """Returns the bytes per step by which memory grows; None if it doesn't, or too little is known yet.

    The first third of what is known is left out: caches, worker start and the allocator's warm-up grow, too,
    but come to an end. A leak grows in each part of the rest at about the same pace.

    Args:
        steps: Steps at which memory was measured, ascending.
        sizes: Bytes at each of these steps.
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


def leak_text(what: str, slope: float, size: float, limit: float | None = None) -> str:
    """Returns one line about a leak.

    Args:
        what: The memory that grows.
        slope: Bytes per step.
        size: Bytes now.
        limit: Bytes at which it is full, if known.
    """
    pace = f"{slope / MIB:,.2f} MiB" if slope >= MIB / 10 else f"{slope / 1024:,.1f} KiB"
    text = f"{what} grows by {pace} with every step"
    if limit is not None and limit > size:
        text += f" and is full after {(limit - size) / slope:,.0f} more"
    return f"{text}; is something kept of each step, such as a loss without .detach()?"


class Trends:
    """A sink that looks for leaks in the memory figures of records."""

    def __init__(self) -> None:
        """Starts without samples."""
        self._seen: dict[str, tuple[list[float], list[float]]] = {key: ([], []) for key in _WHAT}

    def __call__(self, row: Mapping[str, float | int | str]) -> None:
        """Takes a metrics record."""
        if row["kind"] != "train":
            return
        for key, (steps, sizes) in self._seen.items():
            if key in row:
                steps.append(float(row["step"]))
                sizes.append(float(row[key]))

    def lines(self, limits: Mapping[str, float]) -> list[str]:
        """Returns a line for each leak; takes some milliseconds.

        Args:
            limits: Total bytes, by the key of a record, where known.
        """
        return [
            leak_text(_WHAT[key], slope, sizes[-1], limits.get(key))
            for key, (steps, sizes) in self._seen.items()
            if (slope := leak(steps, sizes)) is not None
        ]
