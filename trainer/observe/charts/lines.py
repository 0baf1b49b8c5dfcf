"""Charts as inline SVG, without a script.

A plot has no viewBox: it is as wide as its column, so that text has one size on every screen. Curves lie in
an SVG within it whose viewBox is stretched to the plot, with strokes that aren't.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from markupsafe import Markup

from trainer.observe.charts.axis import Axis, AxisKind, make_axis, step_axis
from trainer.observe.charts.thin import Cell, Point, thinned
from trainer.observe.text import count, escaped, number, scaled, share, size

ACROSS, DOWN = 2000, 1000  # of the stretched viewBox
STRETCHED = f'<svg viewBox="0 0 {ACROSS} {DOWN}" preserveAspectRatio="none" width="100%" height="100%">'
HEIGHT = 150  # CSS pixels of a plot
_APART = 13  # CSS pixels between two labels
_ENDS = 6  # labels beside the ends of curves
_RIGHT = 0.97  # from here on a curve ends on the right
_DOTS = 24  # up to so many points each is shown
_POINTS = 200  # of a curve


class Line(NamedTuple):
    """A curve.

    Attributes:
        name: Name of the figure, or of the run.
        points: Steps and figures; a figure of 0 records is a gap.
        look: Number of its color; -1: gray and dashed, for limits.
    """

    name: str
    points: list[tuple[int, Cell]]
    look: int = 0

    @property
    def drawn(self) -> list[tuple[int, Cell]]:
        """Returns the points without the gaps."""
        return [(step, cell) for step, cell in self.points if cell.rows]


class Mark(NamedTuple):
    """A mark at a step: a short label, a description, and whether it is bad."""

    step: int
    label: str
    what: str
    bad: bool


def line(name: str, points: Sequence[Point], figure: str, look: int = 0) -> Line:
    """Makes a curve of one figure of the records."""
    found = thinned([point for point in points if figure in point.cells], _POINTS)
    return Line(name, [(point.step, point.cells[figure]) for point in found], look)


def written(value: float, kind: AxisKind, unit: str) -> str:
    """Formats a value for the label of a curve."""
    texts: dict[str, Callable[[], str]] = {
        "share": lambda: share(value),
        "bytes": lambda: size(value) + unit,
        "si": lambda: scaled(value, unit),
        "count": lambda: count(value) if 100 <= abs(value) < 1e6 else scaled(value),
    }
    return texts.get(kind, lambda: number(value))()


def line_chart(
    title: str,
    lines: Sequence[Line],
    last: int,
    kind: AxisKind = "number",
    unit: str = "",
    zero: bool = False,
    may_log: bool = False,
    marks: Sequence[Mark] = (),
    keyed: bool = True,
) -> Markup:
    """Draws a chart with curves over the steps of a run; nothing if there is nothing to draw.

    Args:
        title: Title of the chart.
        lines: The curves.
        last: The last step of the axis.
        kind: See `trainer.observe.charts.axis.make_axis`, as for the next three.
        unit: Unit; the label of the axis.
        zero: Whether the axis starts at 0.
        may_log: Whether it may be logarithmic.
        marks: Steps to mark.
        keyed: Whether the chart has a legend for several curves.
    """
    lines = [one for one in lines if one.drawn]
    if not any(one.look >= 0 for one in lines):
        return Markup()
    cells = [cell for one in lines for _, cell in one.drawn]
    low, high = min(cell.low for cell in cells), max(cell.high for cell in cells)
    # A curve of one point tells no range: the axis begins at 0, as a bar's would.
    alone = all(len(one.drawn) == 1 for one in lines)
    up, along = make_axis(low, high, kind, unit, zero or alone, may_log), step_axis(last)
    places = [[(step, round(HEIGHT * up.at(cell.mean))) for step, cell in one.drawn] for one in lines]
    over = [places[:n].count(place) for n, place in enumerate(places)]  # to the pixel at the same places
    named = [one for one in lines if one.look >= 0]
    described = "; ".join(f"{one.name}: {_told(one, kind, unit)}" for one in lines)
    parts = [
        axes(up, along),
        STRETCHED,
        *(curve(one, up, along, hides) for one, hides in zip(lines, over, strict=True)),
        "</svg>",
        *(_mark(mark, along) for mark in marks),
        _ends(named, up, along) if len(named) <= _ENDS else "",
    ]
    key = _key(lines) if keyed and len(lines) > 1 else ""
    notes = ["logarithmic"] * up.log + ["dashed: equal to another"] * any(over)
    return figure_of(title, parts, ", ".join(notes), key, f"{title}. {described}")


def _told(one: Line, kind: AxisKind, unit: str) -> str:
    drawn = one.drawn
    first, end = drawn[0], drawn[-1]
    low, high = min(cell.low for _, cell in drawn), max(cell.high for _, cell in drawn)
    return (
        f"{written(first[1].mean, kind, unit)} at step {count(first[0])}, "
        f"{written(end[1].mean, kind, unit)} at step {count(end[0])}, "
        f"from {written(low, kind, unit)} to {written(high, kind, unit)}"
    )


def figure_of(
    title: str, parts: Iterable[str], note: str, key: str, described: str, wide: bool = False
) -> Markup:
    """Builds a plot with its title, a note, a legend (HTML), and a description for screen readers."""
    noted, wide_ = f"<span>{note}</span>" * bool(note), ' class="wide"' * wide
    return Markup(
        f"<figure{wide_}><figcaption><b>{escaped(title)}</b>{noted}{key}</figcaption>"
        f'<svg class="plot" height="{HEIGHT}" role="img" aria-label="{escaped(described, 1000)}">'
        f"{''.join(parts)}</svg></figure>"
    )


def _key(lines: Sequence[Line]) -> str:
    items = "".join(f'<li><i class="{_look(one)}"></i>{escaped(one.name, 60)}</li>' for one in lines)
    return f'<ul class="key">{items}</ul>'


def _look(one: Line) -> str:
    """Returns the style of a curve: seven colors; from the eighth curve on they repeat, dashed."""
    return "limit" if one.look < 0 else f"c{one.look % 7}" + " dashed" * (one.look >= 7)


def axes(up: Axis, along: Axis, across: str = "step") -> str:
    """Draws grid lines, labels and titles of the axes; `across` is the title of the horizontal one."""
    parts = []
    for value, text in up.ticks:
        y = percent(1 - up.at(value))
        parts.append(f'<line class="grid" x2="100%" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick" x="-8" y="{y}" dy=".35em" text-anchor="end">{text}</text>')
    parts.append('<line class="base" x2="100%" y1="100%" y2="100%"/>')
    for value, text in along.ticks:
        x = percent(along.at(value))
        parts.append(f'<line class="base" x1="{x}" x2="{x}" y1="100%" y2="{HEIGHT + 4}"/>')
        parts.append(f'<text class="tick" x="{x}" y="100%" dy="17" text-anchor="middle">{text}</text>')
    parts.append(f'<text class="axis y" x="-44" y="-12">{escaped(up.unit, 60)}</text>')
    parts.append(
        f'<text class="axis x" x="100%" y="100%" dy="32" text-anchor="end">{escaped(across, 60)}</text>'
    )
    return "".join(parts)


def percent(part: float) -> str:
    """Formats a position in a plot, from 0 to 1, for SVG."""
    return f"{100 * part:.2f}".rstrip("0").rstrip(".") + "%"


def curve(one: Line, up: Axis, along: Axis, hides: int = 0) -> str:
    """Draws means as a line, with the range around it where records were joined; a single point is a dot.

    Args:
        hides: Number of identical curves below, which are visible through this one's gaps.
    """

    def place(step: int, value: float) -> tuple[int, int]:
        return round(ACROSS * along.at(step)), round(DOWN * (1 - up.at(value)))

    pieces = list[list[tuple[int, Cell]]]([[]])
    for step, cell in one.points:
        if cell.rows:
            pieces[-1].append((step, cell))
        elif pieces[-1]:
            pieces.append([])
    paths = list[str]()
    means = [[place(step, cell.mean) for step, cell in piece] for piece in pieces if piece]
    for piece in pieces:
        if any(cell.rows > 1 for _, cell in piece):
            above = [place(step, cell.high) for step, cell in piece]
            below = [place(step, cell.low) for step, cell in reversed(piece)]
            paths.append(f'<path class="band" d="{_path([*above, *below])}z"/>')
    paths += [f'<path d="{_path(piece)}"/>' for piece in means if len(piece) > 1]
    every = [point for piece in means for point in piece]
    dots = every if len(every) <= _DOTS and one.look >= 0 else [every[-1]]
    if one.look >= 0:
        paths.append(f'<path class="dot" d="{"".join(f"M{x},{y}h.01" for x, y in dots)}"/>')
    gaps = f" over{min(hides, 3)}" if hides else ""
    return f'<g class="{_look(one)}{gaps}">{"".join(paths)}</g>'


def _path(points: Sequence[tuple[int, int]]) -> str:
    """Makes an SVG path from point to point, with relative moves: half as long as absolute ones."""
    (x, y), *rest = points
    parts = [f"M{x},{y}"]
    if rest:
        parts.append("l")
    for there_x, there_y in rest:
        step = f"{there_x - x},{there_y - y}"
        parts.append(step if parts[-1] == "l" else f" {step}")
        x, y = there_x, there_y
    return "".join(parts)


def _mark(mark: Mark, along: Axis) -> str:
    x = percent(along.at(mark.step))
    return (
        f'<g class="mark{" bad" * mark.bad}"><title>{escaped(mark.what)}</title>'
        f'<line x1="{x}" x2="{x}" y2="100%"/>'
        f'<text class="tick" x="{x}" y="-2" text-anchor="middle">{escaped(mark.label, 12)}</text></g>'
    )


def _ends(lines: Sequence[Line], up: Axis, along: Axis) -> str:
    """Draws the last value beside each curve that ends on the right, moved apart where they would overlap."""
    ended = [one for one in lines if along.at(one.drawn[-1][0]) > _RIGHT]
    ends = [(HEIGHT * (1 - up.at(one.drawn[-1][1].mean)), one) for one in ended]
    ends.sort(key=lambda end: end[0])
    floor, places = 0.0, list[float]()
    for y, _ in ends:
        places.append(max(y, floor + _APART if places else y))
        floor = places[-1]
    for n in range(len(places) - 1, -1, -1):
        places[n] = min(places[n], HEIGHT - _APART * (len(places) - 1 - n))
    return "".join(
        f'<text class="end" x="{percent(along.at(one.drawn[-1][0]))}" dx="8" y="{y:.1f}" dy=".35em">'
        f"{up.text(one.drawn[-1][1].mean)}</text>"
        for y, (_, one) in zip(places, ends, strict=True)
    )
