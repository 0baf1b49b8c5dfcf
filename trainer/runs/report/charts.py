"""Charts as inline SVG, without a script: curves over the steps of a run, a bar of phases, a matrix.

A plot has no viewBox: it is as wide as its column, so that text has one size on every screen. Curves lie in
an SVG within it whose viewBox is stretched to the plot, with strokes that aren't.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from markupsafe import Markup

from trainer.config.sizes import GIB, KIB, MIB, TIB
from trainer.observe.text import count, escaped, number, scaled, share, size
from trainer.runs.report.thin import Cell, Point, thinned

Kind = Literal["number", "count", "share", "bytes"]

_ACROSS, _DOWN = 2000, 1000  # of the stretched viewBox
_HEIGHT = 150  # CSS pixels of a plot
_APART = 13  # CSS pixels between two labels
_ENDS = 6  # labels beside the ends of curves
_RIGHT = 0.97  # from here on a curve ends on the right
_DOTS = 24  # up to so many points each is shown
_POINTS = 200  # of a curve

_WIDE = 20.0  # a range that spans this factor may be shown on a logarithmic axis
_LEAST = 1e-100  # what is nearer to 0 is shown there
_BYTES = ((TIB, " TiB"), (GIB, " GiB"), (MIB, " MiB"), (KIB, " KiB"), (1, " B"))
_DECIMAL = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))

_CELL, _LETTER, _MOST_LETTERS = 18, 6, 20  # pixels of the matrix; letters of a class's name


class Axis(NamedTuple):
    """An axis.

    Attributes:
        low: The value at its start, in the unit of the data.
        high: The value at its end.
        log: Whether it is logarithmic.
        ticks: Values and their labels.
    """

    low: float
    high: float
    log: bool
    ticks: list[tuple[float, str]]

    def at(self, value: float) -> float:
        """Returns a value's position from 0 (start) to 1 (end); values beyond an end lie at it."""
        if self.log:
            part = math.log(value / self.low) / math.log(self.high / self.low) if value > 0 else 0.0
        else:
            part = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, part))


def make_axis(
    low: float, high: float, kind: Kind = "number", zero: bool = False, may_log: bool = False
) -> Axis:
    """Makes an axis for a range, with round ticks.

    Args:
        low: The least value.
        high: The largest.
        kind: Format of values: fractions as percent, bytes with their unit, counts with k and M.
        zero: Whether it starts at 0.
        may_log: Whether it may be logarithmic: it is for a wide range.
    """
    low, high = (0.0 if abs(value) < _LEAST else value for value in (low, high))
    if may_log and low > 0 and high / low > _WIDE:
        return _logarithmic(low, high)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        margin, all_ = abs(high) / 2 or 1.0, kind == "share" and 0 <= low <= high <= 1
        low, high = (low if zero and high >= 0 else low - margin), high + margin
        low, high = (max(low, 0.0), min(high, 1.0)) if all_ else (low, high)
    units = {"share": ((0.01, "%"),), "bytes": _BYTES, "count": _DECIMAL, "number": ((1.0, ""),)}[kind]
    largest = max(abs(low), abs(high))
    factor, suffix = next((one for one in units if largest >= one[0]), units[-1])
    step = _round_step((high - low) / factor / 4)
    if kind == "share" and zero and 0.5 < high <= 1:
        high, step = 1.0, 25.0
    first, last = math.floor(low / factor / step + 1e-9), math.ceil(high / factor / step - 1e-9)
    digits = _digits(largest / factor, step)
    ticks = [
        (n * step * factor, number(n * step, digits) + suffix * (n != 0)) for n in range(first, last + 1)
    ]
    return Axis(ticks[0][0], ticks[-1][0], False, ticks)


def _digits(largest: float, step: float) -> int:
    """Returns as many digits as it takes to tell neighbors apart."""
    return max(3, math.floor(math.log10(max(largest / step, 1.0))) + 2)


def _round_step(rough: float) -> float:
    """Rounds up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(max(rough, 1e-250)))
    return next((m * power for m in (1, 2, 5) if m * power >= rough * (1 - 1e-9)), 10 * power)


def _logarithmic(low: float, high: float) -> Axis:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if last - first <= 3 else (1,)
    low, high = low / 1.15, high * 1.15
    powers = range(first, last + 1, max(1, -(-(last - first) // 6)))
    values = [value for n in powers for step in steps if low <= (value := step * 10.0**n) <= high]
    return Axis(low, high, True, [(value, number(value, 3)) for value in values])


def step_axis(last: int) -> Axis:
    """Makes an axis over the steps of a run, from 0 to exactly the last one."""
    high = float(max(last, 1))
    factor, suffix = next((one for one in _DECIMAL if high >= 10 * one[0]), _DECIMAL[-1])
    step = max(_round_step(high / factor / 5), 1.0 if factor == 1.0 else 1e-3)
    ticks = range(math.floor(high / factor / step + 1e-9) + 1)
    return Axis(0.0, high, False, [(n * step * factor, number(n * step) + suffix * (n > 0)) for n in ticks])


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


def _written(value: float, kind: Kind) -> str:
    if kind == "number":
        return number(value)
    if kind == "count":
        return count(value) if 100 <= abs(value) < 1e6 else scaled(value)
    return f"{number(100 * value)}\u00a0%" if kind == "share" else size(value)


def line_chart(
    title: str,
    lines: Sequence[Line],
    last: int,
    kind: Kind = "number",
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
        kind: See `make_axis`, as for `zero` and `may_log`.
        unit: Label of the axis.
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
    up, along = make_axis(low, high, kind, zero or alone, may_log), step_axis(last)
    places = [[(step, round(_HEIGHT * up.at(cell.mean))) for step, cell in one.drawn] for one in lines]
    over = [place in places[:n] for n, place in enumerate(places)]  # to the pixel at the same places
    named = [one for one in lines if one.look >= 0]
    notes = ", ".join(["logarithmic"] * up.log + ["dashed: equal to another"] * any(over))
    parts = [
        *_axes(up, along, unit),
        f'<svg viewBox="0 0 {_ACROSS} {_DOWN}" preserveAspectRatio="none" width="100%" height="100%">',
        *(_curve(one, up, along, hides) for one, hides in zip(lines, over, strict=True)),
        "</svg>",
        *(_mark(mark, along) for mark in marks),
        *(_ends(named, up, along, kind) if len(named) <= _ENDS else ()),
    ]
    items = "".join(f'<li><i class="{_look(one)}"></i>{escaped(one.name, 60)}</li>' for one in lines)
    key = f'<ul class="key">{items}</ul>' if keyed and len(lines) > 1 else ""
    told = "; ".join(
        f"{one.name}: {_written(one.drawn[0][1].mean, kind)} to {_written(one.drawn[-1][1].mean, kind)}"
        for one in lines
    )
    return Markup(
        f"<figure><figcaption><b>{escaped(title)}</b>{f'<span>{notes}</span>' if notes else ''}{key}"
        f'</figcaption><svg class="plot" height="{_HEIGHT}" role="img" '
        f'aria-label="{escaped(f"{title}. {told}", 1000)}">{"".join(parts)}</svg></figure>'
    )


def _look(one: Line) -> str:
    """Returns the style of a curve: seven colors; from the eighth curve on they repeat, dashed."""
    return "limit" if one.look < 0 else f"c{one.look % 7}" + " dashed" * (one.look >= 7)


def _axes(up: Axis, along: Axis, unit: str) -> Iterable[str]:
    """Draws grid lines, labels and titles of the axes."""
    for value, text in up.ticks:
        y = _percent(1 - up.at(value))
        yield f'<line class="grid" x2="100%" y1="{y}" y2="{y}"/>'
        yield f'<text class="tick" x="-8" y="{y}" dy=".35em" text-anchor="end">{text}</text>'
    yield '<line class="base" x2="100%" y1="100%" y2="100%"/>'
    for value, text in along.ticks:
        x = _percent(along.at(value))
        yield f'<line class="base" x1="{x}" x2="{x}" y1="100%" y2="{_HEIGHT + 4}"/>'
        yield f'<text class="tick" x="{x}" y="100%" dy="17" text-anchor="middle">{text}</text>'
    yield f'<text class="axis y" x="-44" y="-12">{escaped(unit, 60)}</text>'
    yield '<text class="axis x" x="100%" y="100%" dy="32" text-anchor="end">step</text>'


def _percent(part: float) -> str:
    """Formats a position in a plot, from 0 to 1, for SVG."""
    return f"{100 * part:.2f}".rstrip("0").rstrip(".") + "%"


def _curve(one: Line, up: Axis, along: Axis, hides: bool) -> str:
    """Draws means as a line, with the range around it where records were joined; a single point is a dot.

    Args:
        hides: Whether an identical curve is below, which is visible through this one's gaps.
    """

    def path(places: Iterable[tuple[int, float]]) -> str:
        ends = (
            (round(_ACROSS * along.at(step)), round(_DOWN * (1 - up.at(value)))) for step, value in places
        )
        return "M" + "L".join(f"{x},{y}" for x, y in ends)

    pieces = list[list[tuple[int, Cell]]]([[]])
    for step, cell in one.points:
        if cell.rows:
            pieces[-1].append((step, cell))
        elif pieces[-1]:
            pieces.append([])
    paths = list[str]()
    for piece in pieces:
        if any(cell.rows > 1 for _, cell in piece):
            above = [(step, cell.high) for step, cell in piece]
            below = [(step, cell.low) for step, cell in reversed(piece)]
            paths.append(f'<path class="band" d="{path([*above, *below])}z"/>')
        if len(piece) > 1:
            paths.append(f'<path d="{path((step, cell.mean) for step, cell in piece)}"/>')
    if one.look >= 0:
        dots = one.drawn if len(one.drawn) <= _DOTS else one.drawn[-1:]
        drawn = "".join(f"{path([(step, cell.mean)])}h.01" for step, cell in dots)
        paths.append(f'<path class="dot" d="{drawn}"/>')
    return f'<g class="{_look(one)}{" over" * hides}">{"".join(paths)}</g>'


def _mark(mark: Mark, along: Axis) -> str:
    x = _percent(along.at(mark.step))
    return (
        f'<g class="mark{" bad" * mark.bad}"><title>{escaped(mark.what)}</title>'
        f'<line x1="{x}" x2="{x}" y2="100%"/>'
        f'<text class="tick" x="{x}" y="-2" text-anchor="middle">{escaped(mark.label, 12)}</text></g>'
    )


def _ends(lines: Sequence[Line], up: Axis, along: Axis, kind: Kind) -> Iterable[str]:
    """Draws the last value beside each curve that ends on the right, moved apart where they would overlap."""
    ends = [one.drawn[-1] for one in lines if along.at(one.drawn[-1][0]) > _RIGHT]
    ends.sort(key=lambda end: -end[1].mean)
    floor = -float(_APART)
    for n, (step, cell) in enumerate(ends):
        room = _HEIGHT - _APART * (len(ends) - 1 - n)
        floor = min(max(_HEIGHT * (1 - up.at(cell.mean)), floor + _APART), room)
        yield (
            f'<text class="end" x="{_percent(along.at(step))}" dx="8" y="{floor:.1f}" dy=".35em">'
            f"{_written(cell.mean, kind)}</text>"
        )


def phase_bar(totals: Sequence[tuple[str, float]], what: str, labeled: bool) -> Markup:
    """Draws one bar: seconds by phase.

    Args:
        totals: Phases and their seconds.
        what: Description for screen readers.
        labeled: True to label large parts above the bar.
    """
    every = sum(seconds for _, seconds in totals)
    left, parts = 0.0, list[str]()
    for phase, seconds in totals:
        x, width = _percent(left / every), _percent(seconds / every)
        parts.append(f'<rect class="p-{phase}" x="{x}" width="{width}" height="100%"/>')
        if phase == "unexplained":
            parts.append(f'<g class="hatched"><rect x="{x}" width="{width}" height="100%"/></g>')
        if labeled and seconds >= 0.1 * every:
            small = " small" * (seconds < 0.3 * every)
            parts.append(f'<text class="name{small}" x="{x}" y="-7">{phase} {share(seconds / every)}</text>')
        left += seconds
    told = ", ".join(f"{phase} {share(seconds / every)}" for phase, seconds in totals)
    return Markup(
        f'<svg class="bar{" labeled" * labeled}" role="img" aria-label="{escaped(f"{what}: {told}", 1000)}">'
        f"{''.join(parts)}</svg>"
    )


def confusion_chart(confusion: Iterable[Sequence[int]], classes: Sequence[str]) -> str:
    """Draws a confusion matrix: a row for each true class, darker for larger fractions of it.

    Args:
        confusion: [true class, predicted class, samples] of each cell that isn't empty.
        classes: Names of the classes.
    """
    matrix = [[0] * len(classes) for _ in classes]
    for true, taken_for, samples in confusion:
        matrix[true][taken_for] = samples
    names = [name if len(name) <= _MOST_LETTERS else f"{name[: _MOST_LETTERS - 1]}…" for name in classes]
    margin = 30 + _LETTER * max(map(len, names))
    side = max(margin + _CELL * len(classes) + 10, 220)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {side} {side}" width="{side}" height="{side}" '
        'font-family="sans-serif" font-size="10">',
        f'<rect width="{side}" height="{side}" fill="#ffffff"/>',
        '<text x="4" y="12" fill="#555555">predicted (across), true (down)</text>',
    ]
    for row, (name, counts) in enumerate(zip(names, matrix, strict=True)):
        middle = margin + row * _CELL + _CELL / 2
        label = escaped(name)
        parts.append(f'<text x="{margin - 4}" y="{middle + 3:g}" text-anchor="end">{label}</text>')
        parts.append(f'<text transform="translate({middle + 3:g} {margin - 4}) rotate(-90)">{label}</text>')
        for column, samples in enumerate(counts):
            fraction = samples / max(1, sum(counts))
            x, y = margin + column * _CELL, margin + row * _CELL
            fill = f"hsl(231 60% {97 - 60 * fraction:.0f}%)"
            parts.append(
                f'<rect x="{x}" y="{y}" width="{_CELL - 1}" height="{_CELL - 1}" fill="{fill}">'
                f"<title>{label} as {escaped(classes[column])}: {samples}</title></rect>"
            )
            if samples and len(classes) <= 20:
                ink = "#ffffff" if fraction > 0.5 else "#222222"
                parts.append(
                    f'<text x="{x + _CELL / 2 - 0.5:g}" y="{y + _CELL / 2 + 3:g}" text-anchor="middle" '
                    f'font-size="7" fill="{ink}">{samples}</text>'
                )
    return "\n".join([*parts, "</svg>\n"])
