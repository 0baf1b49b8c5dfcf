"""Charts of the wall time by phase: one bar for the run, and stacks over its steps."""

from collections.abc import Sequence

from markupsafe import Markup

from trainer.observe.charts.axis import make_axis, step_axis
from trainer.observe.charts.lines import ACROSS, DOWN, STRETCHED, axes, figure_of, percent
from trainer.observe.charts.thin import Point, thinned
from trainer.observe.text import count, escaped, share

_BARS = 120
_FEW = 48  # most bars with gaps between them

# Phases in stacking order, the useful ones first.
PHASES_EXPLAINED = {
    "forward": "the model's forward pass",
    "backward": "its gradients",
    "update": "the optimizer's step, with clipping and loss scaling",
    "communication": "gradients between ranks, where not hidden by computation",
    "copy": "batches on their way to the device",
    "data": "waiting for the next batch",
    "host": "Python between the others",
    "evaluation": "evaluating the model",
    "checkpoint": "training paused for a checkpoint",
    "logging": "reading and writing metrics",
    "start": "until the first step: late imports, loader workers",
    "end": "after the last step",
    "unexplained": "time that no timer covers",
}


def phase_chart(points: Sequence[Point], last: int) -> Markup:
    """Draws fractions of the wall time by phase, over the steps of a run; nothing without timings."""
    rows = thinned([point for point in points if "time/wall" in point.cells], _BARS)
    rows = [row for row in rows if row.cells["time/wall"].total > 0]
    if not rows:
        return Markup()
    along = step_axis(last)
    bars, hatched = dict[str, list[str]](), list[str]()
    before = 0
    for row in rows:
        x, right = round(ACROSS * along.at(before)), round(ACROSS * along.at(row.step))
        before, low, wall = row.step, 0.0, row.cells["time/wall"].total
        for phase in PHASES_EXPLAINED:
            cell = row.cells.get(f"time/{phase}")
            part = max(0.0, cell.total / wall) if cell else 0.0
            y, low = round(DOWN * (1 - low)), min(1.0, low + part)
            top = round(DOWN * (1 - low))
            if y <= top or right <= x:
                continue
            bars.setdefault(phase, []).append(f"M{x},{y}H{right}V{top}H{x}z")
            if phase == "unexplained":
                hatched.append(
                    f'<rect x="{percent(x / ACROSS)}" y="{percent(top / DOWN)}" '
                    f'width="{percent((right - x) / ACROSS)}" height="{percent((y - top) / DOWN)}"/>'
                )
    few = ' class="few"' if len(rows) <= _FEW else ""
    paths = "".join(f'<path class="p-{phase}" d="{"".join(paths)}"/>' for phase, paths in bars.items())
    parts = [
        axes(make_axis(0, 1, "share", " of the wall time", zero=True), along),
        f"{STRETCHED}<g{few}>{paths}</g></svg>",
        f'<g class="hatched">{"".join(hatched)}</g>',
    ]
    told = "Share of the wall time by phase over the run"
    return figure_of(
        "Over the run", parts, f"a bar for {count(last / len(rows))} steps, on average", "", told, wide=True
    )


def phase_bar(totals: Sequence[tuple[str, float]], what: str, labeled: bool) -> Markup:
    """Draws one bar: seconds by phase, in the order of `PHASES_EXPLAINED`.

    Args:
        what: Description for screen readers.
        labeled: True to label large parts above the bar.
    """
    every = sum(seconds for _, seconds in totals)
    left, parts = 0.0, list[str]()
    for phase, seconds in totals:
        x, width = percent(left / every), percent(seconds / every)
        parts.append(f'<rect class="p-{phase}" x="{x}" width="{width}" height="100%"/>')
        if phase == "unexplained":
            parts.append(f'<g class="hatched"><rect x="{x}" width="{width}" height="100%"/></g>')
        if labeled and seconds >= 0.1 * every:
            small = " small" * (seconds < 0.3 * every)
            parts.append(
                f'<text class="name{small}" x="{x}" y="-7">{phase} {escaped(share(seconds / every))}</text>'
            )
        left += seconds
    said = ", ".join(f"{phase} {share(seconds / every)}" for phase, seconds in totals)
    told = escaped(f"{what}: {said}", 1000)
    return Markup(
        f'<svg class="bar{" labeled" if labeled else ""}" role="img" aria-label="{told}">'
        f"{''.join(parts)}</svg>"
    )
