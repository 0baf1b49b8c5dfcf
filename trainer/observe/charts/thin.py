"""Reduces the records of a run to bounded memory: neighbors are joined, with their minimum and maximum."""

from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from operator import mul
from typing import Any, NamedTuple

_Row = Mapping[str, Any]

# Beyond this no figure of a training is one.
_LARGEST = 1e200


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
        length_of: Callable[[str, _Row, int], float] = lambda *_: 1.0,
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
        self._block: list[tuple[int, int, _Row]] = []
        self._stride, self._before = 1, 0

    def add(self, step: int, row: _Row) -> None:
        """Adds a record; values that aren't numbers are ignored."""
        self._block.append((step, step - self._before, row))
        self._before = step
        if len(self._block) < self._stride:
            return
        self._flush()
        if len(self._points) >= 2 * self._most:
            self._points = _halved(self._points)
            self._stride *= 2

    def _flush(self) -> None:
        columns: dict[str, list[Any]] = {}
        for _, _, row in self._block:
            for name, value in row.items():
                if name in columns:
                    columns[name].append(value)
                else:
                    columns[name] = [value]
        keep = self._keep
        for name in columns.keys() - keep.keys():
            if len(keep) > 1000 or len(name) > 100:  # somebody makes up names
                columns.pop(name)
                continue
            keep[name] = self._wanted(name)
        lengths = dict[str, list[float]]()
        cells = dict[str, Cell]()
        for name, values in columns.items():
            if not keep[name]:
                continue
            weights, span = None, self._span_of(name)
            if span and span not in lengths:
                lengths[span] = [self._length_of(span, row, steps) for _, steps, row in self._block]
            if span:
                weights = [
                    each for each, (_, _, row) in zip(lengths[span], self._block, strict=True) if name in row
                ]
            if cell := _cell(values, weights):
                cells[name] = cell
        self._points.append(Point(max(step for step, *_ in self._block), len(self._block), cells))
        self._block = []

    def points(self) -> list[Point]:
        """Returns all points, in the order of their steps; at most twice the requested number."""
        if self._block:
            self._flush()
        return sorted(self._points, key=lambda point: point.step)


def _cell(values: list[Any], weights: list[float] | None) -> Cell | None:
    """Joins those values that are numbers; None if there is neither a number nor null among them."""
    numbers = [value for value in values if type(value) in (float, int) and -_LARGEST < value < _LARGEST]
    if not numbers:
        odd = any(value is None or type(value) in (float, int) for value in values)
        return Cell(0.0, 0.0, 0.0, 0, 0.0, 0.0) if odd else None
    total = float(sum(numbers))
    weighted, weight = total, float(len(numbers))
    if weights is not None:
        if len(numbers) < len(values):
            odd_ones = [
                type(value) not in (float, int) or not -_LARGEST < value < _LARGEST for value in values
            ]
            weights = [length for length, odd in zip(weights, odd_ones, strict=True) if not odd]
        weighted, weight = float(sum(map(mul, numbers, weights))), sum(weights)
    return Cell(float(min(numbers)), float(max(numbers)), total, len(numbers), weighted, weight)


def joined(cells: Iterable[Cell]) -> Cell | None:
    """Merges cells of one figure; None if there are none."""
    there = list(cells)
    return reduce(_sum, there) if there else None


def _sum(one: Cell, other: Cell) -> Cell:
    if not one.rows or not other.rows:
        return one if one.rows else other
    return Cell(
        min(one.low, other.low),
        max(one.high, other.high),
        one.total + other.total,
        one.rows + other.rows,
        one.weighted + other.weighted,
        one.weight + other.weight,
    )


def thinned(points: list[Point], most: int) -> list[Point]:
    """Joins points until there are at most so many; the last one stays as it is."""
    points, last = points[:-1], points[-1:]
    while len(points) >= most:
        points = _halved(points)
    return points + last


def _halved(points: list[Point]) -> list[Point]:
    pairs = zip(points[::2], points[1::2], strict=False)
    merged = [_merged(one, other) for one, other in pairs]
    return merged + points[2 * len(merged) :]


def _merged(one: Point, other: Point) -> Point:
    cells = dict(one.cells)
    for name, cell in other.cells.items():
        cells[name] = _sum(cells[name], cell) if name in cells else cell
    return Point(max(one.step, other.step), one.rows + other.rows, cells)
