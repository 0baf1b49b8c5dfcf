"""Goodput over GPUs, and lost time over the interval of checkpoints, as one chart."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from benchmarks.charts import FAINT
from benchmarks.scale.table import percent
from trainer.observe.text import count, duration

Points = Sequence[tuple[float, float]]

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")


class Curve(NamedTuple):
    """A curve of a plot.

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


def chart(title: str, goodput: Curve, losses: Sequence[Curve]) -> Figure:
    """Both plots, side by side."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    figure.suptitle(title, x=0, ha="left", fontsize=8)
    left, right = figure.subplots(1, 2)
    left.set(xscale="log", title="goodput over GPUs", xlabel="GPUs")
    right.set(xscale="log", yscale="log", title="time lost over the seconds between two checkpoints")
    right.set_xlabel("s; lines: formulas; dots: simulation; ring: the least, by Daly")
    _draw(left, goodput, _COLORS[0])
    left.set_ylim(bottom=0)
    left.set_xticks([at for at, _ in goodput.dots], [count(at) for at, _ in goodput.dots])
    left.xaxis.set_minor_locator(NullLocator())
    for number, curve in enumerate(losses):
        _draw(right, curve, _COLORS[number % len(_COLORS)])
    for axes in (left, right):
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: percent(value)))
        axes.grid(color="#dddddd")
        axes.title.set_fontsize(9)
        axes.tick_params(labelsize=8, colors=FAINT)
    return figure


def _draw(axes: Axes, curve: Curve, color: str) -> None:
    axes.plot(*zip(*curve.line, strict=True), color=color, linewidth=1.5)
    if curve.dots:
        axes.plot(*zip(*curve.dots, strict=True), "o", color=color, markersize=4)
    if curve.least is not None:
        axes.plot(*curve.least, "o", color=color, markersize=9, fillstyle="none")
        told = f"{duration(curve.least[0])}, {percent(curve.least[1])}"
        axes.annotate(told, curve.least, (0, 8), textcoords="offset points", ha="center", fontsize=8)
    if curve.name:
        axes.annotate(curve.name, curve.line[-1], (4, 0), textcoords="offset points", fontsize=8)


def spaced(low: float, high: float, count: int) -> list[float]:
    """Returns so many values from low to high, geometrically spaced."""
    return [low * math.exp(math.log(high / low) * n / (count - 1)) for n in range(count)]
