"""A heat map as inline SVG: one figure of many parts over the steps of a run."""

import math
from collections.abc import Sequence

from trainer.observe.charts.axis import Kind, step_axis
from trainer.observe.charts.lines import ACROSS, DOWN, STRETCHED, percent, written
from trainer.observe.charts.thin import Cell, Point, thinned
from trainer.observe.text import count, escaped

_COLUMNS = 100
_LEVELS = 9  # from the palest, 0, to the darkest
_TALL = 13  # CSS pixels of a row
_NAME = 24  # letters


def heat_map(
    title: str, points: Sequence[Point], figures: Sequence[tuple[str, str]], last: int, kind: Kind = "number"
) -> str:
    """A row for each figure, from the left to the right; nothing if there is nothing to draw.

    Shares have a linear scale, all else a logarithmic one. A value that wasn't finite is hatched.

    Args:
        figures: What a row is called, and the name of its figure.
        last: The last step of the axis.
        kind: How values are written.
    """
    drawn = thinned(list(points), _COLUMNS)
    rows = [(name, figure) for name, figure in figures if any(figure in point.cells for point in drawn)]
    values = [cell.mean for point in drawn for _, figure in rows if (cell := _cell(point, figure))]
    if not rows or not values or (kind == "share" and not any(values)):
        return ""
    low, high = min((v for v in values if v > 0), default=0.0), max(values)
    low = 0.0 if kind == "share" else low
    along, tall = step_axis(last), _TALL * len(rows)
    paths, odd, labels = dict[int, list[str]](), list[str](), list[str]()
    for number, (name, figure) in enumerate(rows):
        before = 0
        for point in drawn:
            x, right = round(ACROSS * along.at(before)), round(ACROSS * along.at(point.step))
            before, cell = point.step, point.cells.get(figure)
            if cell is None or right <= x:
                continue
            if not cell.rows:
                odd.append(
                    f'<rect x="{percent(x / ACROSS)}" y="{percent(number / len(rows))}" '
                    f'width="{percent((right - x) / ACROSS)}" height="{percent(1 / len(rows))}"/>'
                )
                continue
            level = _level(cell.mean, low, high, kind == "share")
            top = _TALL * number
            paths.setdefault(level, []).append(f"M{x},{top}H{right}V{top + _TALL}H{x}z")
        short = name if len(name) <= _NAME else f"…{name[1 - _NAME :]}"
        y = percent((number + 0.5) / len(rows))
        labels.append(
            f'<text class="tick" x="-8" y="{y}" dy=".35em" text-anchor="end">{escaped(short, 60)}</text>'
        )
    ticks = "".join(
        f'<text class="tick" x="{percent(along.at(at))}" y="100%" dy="17" text-anchor="middle">{text}</text>'
        for at, text in along.ticks
    )
    stretched = STRETCHED.replace(f" {ACROSS} {DOWN}", f" {ACROSS} {tall}")
    cells = "".join(f'<path class="h{level}" d="{"".join(d)}"/>' for level, d in sorted(paths.items()))
    key = "".join(f'<i class="heat h{level}"></i>' for level in range(_LEVELS))
    first, end = written(low, kind, ""), written(high, kind, "")
    told = f"{title}, of {len(rows)} parts over {count(last)} steps: from {first} to {end}"
    return (
        f'<figure class="wide"><figcaption><b>{escaped(title)}</b>'
        f"<span>{first} {key} {end}{', logarithmic' * (kind != 'share')}</span></figcaption>"
        f'<svg class="plot heat" height="{tall}" role="img" aria-label="{escaped(told, 1000)}">'
        f"{''.join(labels)}{ticks}{stretched}{cells}</svg>"
        f'<g class="hatched">{"".join(odd)}</g>'
        '<text class="axis y" x="-8" y="-6" text-anchor="end">part</text>'
        '<text class="axis x" x="100%" y="100%" dy="32" text-anchor="end">step</text></svg></figure>'
    )


def _cell(point: Point, figure: str) -> Cell | None:
    cell = point.cells.get(figure)
    return cell if cell is not None and cell.rows else None


def _level(value: float, low: float, high: float, linear: bool) -> int:
    if linear:
        part = value / high
    elif value <= 0 or low <= 0:
        part = 0.0
    else:
        part = math.log(value / low) / math.log(high / low) if high > low else 1.0
    return min(_LEVELS - 1, max(0, math.floor(part * _LEVELS)))
