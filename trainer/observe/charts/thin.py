"""Reduces the records of a run to bounded memory: neighbors are joined, with their minimum and maximum."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

# Beyond this no figure of a training is one.
_LARGEST = 1e200


class Cell(NamedTuple):
    """A figure, merged over neighboring records.

    Attributes:
        low: Its minimum.
        high: Its maximum.
        total: Its sum.
        rows: Number of records that have it. 0: they have null, for a value that wasn't finite.
    """

    low: float
    high: float
    total: float
    rows: int

    @property
    def mean(self) -> float:
        """Returns the mean."""
        return self.total / self.rows


class Point(NamedTuple):
    """Neighboring records: the step of the last one, their number, and their figures."""

    step: int
    rows: int
    cells: dict[str, Cell]


class ThinnedRows:
    """Collects records one by one and keeps a bounded number of points."""

    def __init__(self, most: int, wanted: Callable[[str], bool]) -> None:
        """Starts empty."""
        self._most, self._wanted = most, wanted
        self._keep: dict[str, bool] = {}
        self._points: list[Point] = []
        self._block: list[tuple[int, Mapping[str, Any]]] = []
        self._stride = 1

    def add(self, step: int, row: Mapping[str, Any]) -> None:
        """Adds a record; values that aren't numbers are ignored."""
        self._block.append((step, row))
        if len(self._block) < self._stride:
            return
        self._flush()
        if len(self._points) >= 2 * self._most:
            self._points = _halved(self._points)
            self._stride *= 2

    def _flush(self) -> None:
        columns: dict[str, list[Any]] = {}
        for _, row in self._block:
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
        cells = {name: cell for name, values in columns.items() if keep[name] and (cell := _cell(values))}
        self._points.append(Point(max(step for step, _ in self._block), len(self._block), cells))
        self._block = []

    def points(self) -> list[Point]:
        """Returns all points, in the order of their steps; at most twice the requested number."""
        if self._block:
            self._flush()
        return sorted(self._points, key=lambda point: point.step)


def _cell(values: Iterable[Any]) -> Cell | None:
    """Joins those values that are numbers; None if there is neither a number nor null among them."""
    values = list(values)
    numbers = [value for value in values if type(value) in (float, int) and -_LARGEST < value < _LARGEST]
    if numbers:
        return Cell(float(min(numbers)), float(max(numbers)), float(sum(numbers)), len(numbers))
    odd = any(value is None or type(value) in (float, int) for value in values)
    return Cell(0.0, 0.0, 0.0, 0) if odd else None


def thinned(points: list[Point], most: int) -> list[Point]:
    """Joins points until there are at most so many; the last one stays as it is."""
    points, last = points[:-1], points[-1:]
    while len(points) >= most:
        points = _halved(points)
    return points + last


def _halved(points: list[Point]) -> list[Point]:
    pairs = zip(points[::2], points[1::2], strict=False)
    joined = [_joined(one, other) for one, other in pairs]
    return joined + points[2 * len(joined) :]


def _joined(one: Point, other: Point) -> Point:
    cells = dict(one.cells)
    for name, cell in other.cells.items():
        before = cells.get(name)
        cells[name] = cell if before is None or not before.rows else _sum(before, cell)
    return Point(max(one.step, other.step), one.rows + other.rows, cells)


def _sum(one: Cell, other: Cell) -> Cell:
    if not other.rows:
        return one
    low, high = min(one.low, other.low), max(one.high, other.high)
    return Cell(low, high, one.total + other.total, one.rows + other.rows)
