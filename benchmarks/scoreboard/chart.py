"""The scoreboard as one chart: ratios with their intervals, and counts as bars."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.charts import FAINT, beside, cut, interval, named_rows, ratios
from benchmarks.scoreboard.figures import Absent, Part, Row, Timed, verdict

_TICKS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
_COLORS = {"trainer wins": "#007a52", "trainer loses": "#d55e00", "undecided": "#8a6d00", "equal": "#0072b2"}
_KEY = (
    "ratios: trainer's cost / theirs, less is better for the trainer; the line holds the true median with "
    "95 % probability"
)


def chart(title: str, parts: Sequence[Part]) -> Figure:
    """A row for each comparison: a dot at the ratio, a line for its interval; or a bar of what was right."""
    heights = [len(part.rows) + 2 for part in parts]
    figure = Figure(figsize=(13, 0.8 + 0.2 * sum(heights)), layout="constrained")
    figure.suptitle(f"{title}\n{_KEY}", x=0, ha="left", fontsize=8, color=FAINT)
    plots = figure.subplots(len(parts), squeeze=False, gridspec_kw={"height_ratios": heights})
    for part, axes in zip(parts, plots[:, 0], strict=True):
        _draw(part, axes)
    return figure


def _draw(part: Part, axes: Axes) -> None:
    axes.set_title(part.name, loc="left", fontsize=9, fontweight="bold")
    named_rows(axes, [_name(row) for row in part.rows])
    if any(isinstance(row, Timed) for row in part.rows):
        ratios(axes, _TICKS)
    else:
        words = f"failed: {part.failed}" if part.failed else "how often it was right"
        words = f"not measured: {part.lacking}" if part.lacking else words
        axes.set_title(cut(words, 90), loc="right", fontsize=8, color=FAINT)
        axes.set_xlim(0, 1)
        axes.set_xticks([])
    for number, row in enumerate(part.rows):
        if isinstance(row, Absent):
            beside(axes, number, cut(row.why, 100), FAINT, at=0)
            continue
        outcome, words = verdict(part, row)
        color = _COLORS[outcome] if outcome else FAINT
        if isinstance(row, Timed):
            interval(axes, number, row.low, row.ratio, row.high, color)
            words = f"{row.ratio:.3f} ({row.low:.3f} to {row.high:.3f}): {words}"
        else:
            color = _COLORS["equal"] if row.ours is None else color
            axes.barh(number, [1, row.right / max(1, row.of)], 0.7, color=["#eeeeee", color])
            words = f"{row.right} of {row.of}{words and f': {words}'}"
        beside(axes, number, cut(words, 72), color)


def _name(row: Row) -> str:
    return cut(f"{row.ours} / {row.against}" if isinstance(row, Timed) else row.against, 66)
