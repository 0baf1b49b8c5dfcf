"""Goodput over GPUs, lost time over the interval of checkpoints, as one SVG file."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.scale.table import percent
from trainer.observe.charts.axis import Axis, make_axis
from trainer.observe.text import count, duration, escaped

Points = Sequence[tuple[float, float]]

_WIDE, _HIGH = 360, 240  # a plot, in CSS pixels
_LEFT, _TOP, _APART = 60, 64, 100
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555")
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.faint{fill:#767676}.grid{stroke:#ddd}"
    ".base{stroke:#767676}path{fill:none;stroke-width:1.5}"
)


class Curve(NamedTuple):
    """One curve of a plot.

    Attributes:
        name: Beside its end; may be empty.
        line: By formula.
        dots: Simulated.
        least: Where the line is lowest, None if that isn't marked.
    """

    name: str
    line: Points
    dots: Points = ()
    least: tuple[float, float] | None = None


def chart(title: str, goodput: Curve, losses: Sequence[Curve]) -> str:
    """The SVG file's text."""
    left = _plot("goodput over GPUs", "GPUs", [goodput], 0, "share")
    right = _plot("time lost over the seconds between two checkpoints", "s", losses, _WIDE + _APART, "log")
    wide, high = 2 * _LEFT + 2 * _WIDE + _APART, _TOP + _HIGH + 64
    key = "lines: formulas; dots: simulation; ring: the least, by Daly"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}" '
        f'role="img"><style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="10" y="18">{escaped(title)}</text>{left}{right}'
        f'<text class="faint" x="10" y="{high - 8}">{key}</text></svg>\n'
    )


def _plot(title: str, unit: str, curves: Sequence[Curve], x: int, kind: str) -> str:
    points = [point for curve in curves for point in (*curve.line, *curve.dots)]
    along = make_axis(min(a for a, _ in points), max(a for a, _ in points), "count", may_log=True)
    values = [value for _, value in points]
    if kind == "share":
        up = make_axis(min(0.0, *values), max(values), "share", zero=True)
        along = along._replace(ticks=[(at, count(at)) for curve in curves for at, _ in curve.dots])
    else:
        up = make_axis(min(values), max(values), "share", may_log=True)
    parts = [f'<g transform="translate({_LEFT + x},{_TOP})"><text x="0" y="-22">{title}</text>']
    parts += [_tick_up(up, value) for value, _ in up.ticks]
    for value, text in along.ticks:
        place = f'x="{_WIDE * along.at(value):.1f}" y="{_HIGH + 16}"'
        parts.append(f'<text class="faint" {place} text-anchor="middle">{escaped(text)}</text>')
    parts.append(f'<text class="faint" x="{_WIDE}" y="{_HIGH + 32}" text-anchor="end">{unit}</text>')
    parts.append(f'<path class="base" d="M0,{_HIGH}h{_WIDE}"/>')
    for number, curve in enumerate(curves):
        parts.append(_drawn(curve, up, along, _COLOURS[number % len(_COLOURS)]))
    return "".join([*parts, "</g>"])


def _tick_up(up: Axis, value: float) -> str:
    y = _HIGH * (1 - up.at(value))
    return (
        f'<path class="grid" d="M0,{y:.1f}h{_WIDE}"/>'
        f'<text class="faint" x="-6" y="{y + 4:.1f}" text-anchor="end">{percent(value)}</text>'
    )


def _drawn(curve: Curve, up: Axis, along: Axis, colour: str) -> str:
    def at(point: tuple[float, float]) -> tuple[float, float]:
        return _WIDE * along.at(point[0]), _HIGH * (1 - up.at(point[1]))

    path = "L".join(f"{x:.1f},{y:.1f}" for x, y in map(at, curve.line))
    parts = [f'<path stroke="{colour}" d="M{path}"/>']
    parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in map(at, curve.dots)]
    if curve.least is not None:
        x, y = at(curve.least)
        told = f"{duration(curve.least[0])}, {percent(curve.least[1])}"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="none" stroke="{colour}" stroke-width="2"/>'
            f'<text x="{x:.1f}" y="{y - 11:.1f}" text-anchor="middle">{escaped(told)}</text>'
        )
    if curve.name:
        x, y = at(curve.line[-1])
        parts.append(f'<text x="{x + 5:.1f}" y="{y + 4:.1f}">{escaped(curve.name)}</text>')
    return "".join(parts)


def spaced(low: float, high: float, count: int) -> list[float]:
    """So many values from low to high, each the same times the one before."""
    return [low * math.exp(math.log(high / low) * n / (count - 1)) for n in range(count)]
