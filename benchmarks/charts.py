"""Charts as SVG files by matplotlib: the same bytes for the same figures."""

import io
from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

FAINT, INK = "#767676", "#222222"


def as_svg(figure: Figure) -> str:
    """The file's text, with letters as letters, without the date and without random names."""
    text = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "trainer", "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


def named_rows(axes: Axes, names: Sequence[str]) -> None:
    """A row for each name, from the top down, without a frame."""
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)


def ratios(axes: Axes, ticks: Sequence[float]) -> None:
    """A logarithmic axis of ratios, from the first tick to the last, with a line at 1."""
    axes.set_xscale("log")
    axes.set_xlim(ticks[0], ticks[-1])
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.xaxis.tick_top()
    axes.grid(axis="x", color="#dddddd")
    axes.axvline(1, color=FAINT, linewidth=1)


def interval(axes: Axes, row: int, low: float, middle: float, high: float, color: str) -> None:
    """A dot with a line for its interval; what lies beyond an end of the axis, at that end."""
    least, most = axes.get_xlim()
    low, middle, high = (min(max(value, least), most) for value in (low, middle, high))
    axes.plot([low, high], [row, row], color=color, linewidth=2.5)
    axes.plot(middle, row, "o", color=color, markersize=5)


def beside(axes: Axes, row: int, text: str, color: str, at: float = 1.01) -> None:
    """Adds a remark to a row, right of the plot; or starting at `at`, a fraction of its width."""
    axes.text(at, row, text, color=color, fontsize=8, va="center", transform=axes.get_yaxis_transform())


def cut(text: str, most: int) -> str:
    """Cuts a text to so many letters. A dollar sign would begin a formula."""
    return (text if len(text) <= most else f"{text[: most - 1]}…").replace("$", r"\$")
