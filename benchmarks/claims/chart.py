"""The claims as one chart: each ratio with its interval, and what was claimed."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from benchmarks.charts import FAINT, INK, beside, cut, interval, named_rows, ratios
from benchmarks.claims.claim import Row
from benchmarks.claims.show import verdict

_TICKS = (0.1, 0.25, 0.5, 0.7, 1.0, 1.5, 2.0, 4.0)
_COLORS = {"holds": "#007a52", "doesn't hold": "#d55e00", "undecided": "#8a6d00", "not measured": FAINT}
_KEY = (
    "with the setting / without it, less is better; the upright mark is what was claimed, the line holds the "
    "true median with 95 % probability"
)


def chart(title: str, rows: Sequence[Row]) -> Figure:
    """A row for each claim: a dot at the ratio, a line for its interval, a mark at what was claimed."""
    figure = Figure(figsize=(13, 1.2 + 0.2 * len(rows)), layout="constrained")
    figure.suptitle(f"{title}\n{_KEY}", x=0, ha="left", fontsize=8, color=FAINT)
    axes = figure.add_subplot()
    named_rows(axes, [cut(row.claim.text, 74) for row in rows])
    ratios(axes, _TICKS)
    for number, row in enumerate(rows):
        color = _COLORS[row.verdict]
        axes.plot(row.claim.most, number, "|", color=INK, markersize=10, markeredgewidth=2)
        if row.measured is not None:
            interval(axes, number, row.measured.low, row.measured.ratio, row.measured.high, color)
        beside(axes, number, cut(verdict(row), 52), color)
    return figure
