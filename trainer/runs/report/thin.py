"""Reduces the records of a run to bounded memory: neighbors are joined, with their minimum and maximum."""

from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from itertools import zip_longest
from typing import Any, NamedTuple, TypeGuard

_LARGEST = 1e200  # beyond this no figure of a training is one
_NAMES, _LETTERS = 1000, 100  # more or longer names of figures are made up


def is_number(value: Any) -> TypeGuard[float]:
    """True if a JSON value is a number that can be displayed."""
    return type(value) in (int, float) and -_LARGEST < value < _LARGEST


class Cell(NamedTuple):
    """A figure, merged over neighboring records.

    Attributes:
        low: Its minimum.
        high: Its maximum.
        total: Its sum.
        rows: Number of records that have it. 0: they have null, for a value that wasn't finite.
        weighted: Sum of its values times the records' weights: for a rate, the total of what it counts.
        weight: Sum of the weights: for a rate, the time.
    """

    low: float
    high: float
    total: float
    rows: int
    weighted: float
    weight: float

    @property
    def mean(self) -> float:
        """Returns the weighted mean: for a rate, the total over the time."""
        return self.weighted / self.weight


class Point(NamedTuple):
    """Neighboring records: the step of the last one, their number, and their figures."""

    step: int
    rows: int
    cells: dict[str, Cell]


class ThinnedRows:
    """Collects records one by one and keeps a bounded number of points."""

    def __init__(
        self,
        most: int,
        wanted: Callable[[str], bool],
        span_of: Callable[[str], str] = lambda _: "",
        length_of: Callable[[str, Mapping[str, Any], int], float] = lambda *_: 1.0,
    ) -> None:
        """Starts empty.

        Args:
            most: Number of points to keep, or up to twice as many.
            wanted: True for the name of a figure that is kept.
            span_of: Name of the span by which a figure is weighted; "": each record counts once.
            length_of: Length of a span, by its name, the record, and the steps since the record before.
        """
        self._most, self._wanted = most, wanted
        self._span_of, self._length_of = span_of, length_of
        self._keep: dict[str, bool] = {}
        self._points: list[Point] = []
        self._block: list[tuple[int, int, Mapping[str, Any]]] = []
        self._stride, self._before = 1, 0

    def add(self, step: int, row: Mapping[str, Any]) -> None:
        """Adds a record; values that aren't numbers are ignored."""
        self._block.append((step, step - self._before, row))
        self._before = step
        if len(self._block) == self._stride:
            self._flush()
            if len(self._points) >= 2 * self._most:
                self._points = _halved(self._points)
                self._stride *= 2

    def _flush(self) -> None:
        lengths = {"": [1.0] * len(self._block)}
        cells = dict[str, Cell]()
        for name in dict.fromkeys(name for _, _, row in self._block for name in row):
            if name not in self._keep and len(self._keep) <= _NAMES and len(name) <= _LETTERS:
                self._keep[name] = self._wanted(name)
            if not self._keep.get(name):
                continue
            if (span := self._span_of(name)) not in lengths:
                lengths[span] = [self._length_of(span, row, steps) for _, steps, row in self._block]
            rows = [row.get(name, "") for _, _, row in self._block]
            weights = [one for one, value in zip(lengths[span], rows, strict=True) if is_number(value)]
            values = [float(value) for value in rows if is_number(value)]
            if values:
                weighted = sum(value * one for value, one in zip(values, weights, strict=True))
                cells[name] = Cell(min(values), max(values), sum(values), len(values), weighted, sum(weights))
            elif any(value is None or type(value) in (float, int) for value in rows):
                cells[name] = Cell(0.0, 0.0, 0.0, 0, 0.0, 0.0)
        self._points.append(Point(max(step for step, *_ in self._block), len(self._block), cells))
        self._block = []

    def points(self) -> list[Point]:
        """Returns all points, in the order of their steps; at most twice the requested number."""
        if self._block:
            self._flush()
        return sorted(self._points, key=lambda point: point.step)


def joined(cells: Iterable[Cell]) -> Cell | None:
    """Merges cells of one figure; None if there are none."""
    there = list(cells)
    return reduce(_sum, there) if there else None


def _sum(one: Cell, other: Cell) -> Cell:
    if not one.rows or not other.rows:
        return one if one.rows else other
    sums = (mine + theirs for mine, theirs in zip(one[2:], other[2:], strict=True))
    return Cell(min(one.low, other.low), max(one.high, other.high), *sums)  # type: ignore[arg-type]


def thinned(points: list[Point], most: int) -> list[Point]:
    """Joins points until there are at most so many; the last one stays as it is."""
    points, last = points[:-1], points[-1:]
    while len(points) >= most:
        points = _halved(points)
    return points + last


def _halved(points: list[Point]) -> list[Point]:
    return [_merged(one, other) for one, other in zip_longest(points[::2], points[1::2])]


def _merged(one: Point, other: Point | None) -> Point:
    if other is None:
        return one
    cells = dict(one.cells)
    for name, cell in other.cells.items():
        cells[name] = _sum(cells[name], cell) if name in cells else cell
    return Point(max(one.step, other.step), one.rows + other.rows, cells)
