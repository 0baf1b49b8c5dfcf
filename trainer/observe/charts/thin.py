"""Reduces the records of a run to bounded memory: neighbors are joined, with their minimum and maximum."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

Weight = Callable[[str, Mapping[str, Any], int], float]

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

    def __init__(self, most: int, wanted: Callable[[str], bool], weight: Weight = lambda *_: 1.0) -> None:
        """Starts empty.

        Args:
            most: Number of points to keep, or up to twice as many.
            wanted: True for the name of a figure that is kept.
            weight: Weight of a figure by its name, the record, and the steps since the record before.
        """
        self._most, self._wanted, self._weight = most, wanted, weight
        self._before = 0
        self._keep: dict[str, bool] = {}
        self._points: list[Point] = []
        self._block: list[tuple[int, int, Mapping[str, Any]]] = []
        self._stride = 1

    def add(self, step: int, row: Mapping[str, Any]) -> None:
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
        columns: dict[str, list[tuple[Mapping[str, Any], int]]] = {}
        for _, steps, row in self._block:
            for name in row:
                columns.setdefault(name, []).append((row, steps))
        keep = self._keep
        for name in columns.keys() - keep.keys():
            if len(keep) > 1000 or len(name) > 100:  # somebody makes up names
                columns.pop(name)
                continue
            keep[name] = self._wanted(name)
        cells = {
            name: cell
            for name, rows in columns.items()
            if keep[name] and (cell := joined(self._cell(name, *one) for one in rows))
        }
        self._points.append(Point(max(step for step, *_ in self._block), len(self._block), cells))
        self._block = []

    def _cell(self, name: str, row: Mapping[str, Any], steps: int) -> Cell | None:
        """Returns the figure of one record; None if it is neither a number nor null."""
        value = row[name]
        if type(value) in (float, int) and -_LARGEST < value < _LARGEST:
            weight = self._weight(name, row, steps)
            return Cell(float(value), float(value), float(value), 1, value * weight, weight)
        return Cell(0.0, 0.0, 0.0, 0, 0.0, 0.0) if value is None or type(value) in (float, int) else None

    def points(self) -> list[Point]:
        """Returns all points, in the order of their steps; at most twice the requested number."""
        if self._block:
            self._flush()
        return sorted(self._points, key=lambda point: point.step)


def joined(cells: Iterable[Cell | None]) -> Cell | None:
    """Merges cells of one figure; None if there are none."""
    there = [cell for cell in cells if cell is not None]
    filled = [cell for cell in there if cell.rows]
    if len(filled) < 2:
        return next(iter(filled or there), None)
    low, high, total, rows, weighted, weight = zip(*filled, strict=True)
    return Cell(min(low), max(high), sum(total), sum(rows), sum(weighted), sum(weight))


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
    names = dict.fromkeys((*one.cells, *other.cells))
    cells = {name: joined((one.cells.get(name), other.cells.get(name))) for name in names}
    there = {name: cell for name, cell in cells.items() if cell is not None}
    return Point(max(one.step, other.step), one.rows + other.rows, there)
