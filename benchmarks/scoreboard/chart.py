"""The scoreboard as one SVG file: ratios with their intervals, and counts as bars."""

import math
from collections.abc import Sequence

from benchmarks.scoreboard.figures import Absent, Counted, Part, Row, Timed, verdict
from trainer.observe.text import escaped

_NAMES, _PLOT, _ROW, _HEAD = 430, 380, 19, 60  # CSS pixels
_WIDTH = _NAMES + _PLOT + 430
_LEAST, _MOST = 0.05, 4.0  # ratios at the plot's edges
_TICKS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
_COLOURS = {"trainer wins": "#007a52", "trainer loses": "#d55e00", "undecided": "#8a6d00", "equal": "#0072b2"}
_NEUTRAL = "#767676"  # what doesn't count
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.faint{fill:#767676}.head{font-weight:bold}"
    ".grid{stroke:#ddd}.one{stroke:#222}.all{fill:#eee}"
)


def chart(title: str, parts: Sequence[Part]) -> str:
    """A row for each comparison: a dot at the ratio, a line for its interval; or a bar of what was right."""
    y, drawn = _HEAD, list[str]()
    for part in parts:
        y += _ROW
        drawn.append(f'<text class="head" x="10" y="{y}">{escaped(part.name)}</text>')
        ratios = any(isinstance(row, Timed) for row in part.rows)
        if ratios:
            drawn.append(_scale(y, len(part.rows)))
        else:
            words = f"failed: {part.failed}" if part.failed else "how often it was right"
            words = f"not measured: {part.lacking}" if part.lacking else words
            drawn.append(f'<text class="faint" x="{_NAMES}" y="{y}">{escaped(_cut(words, 90))}</text>')
        for row in part.rows:
            y += _ROW
            drawn.append(_row(part, row, y))
        y += _ROW // 2
    height = y + 16
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" role="img"><style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>'
        f'<text class="faint" x="10" y="18">{escaped(title)}</text>'
        '<text class="faint" x="10" y="36">ratios: trainer\'s cost / theirs, less is better for the trainer; '
        "the line holds the true median with 95 % probability</text>"
        f"{''.join(drawn)}</svg>\n"
    )


def _scale(y: int, rows: int) -> str:
    parts = []
    for tick in _TICKS:
        x = _at(tick)
        look = "one" if tick == 1 else "grid"
        parts.append(f'<path class="{look}" d="M{x:.1f},{y + 4}v{rows * _ROW}"/>')
        parts.append(f'<text class="faint" x="{x:.1f}" y="{y}" text-anchor="middle">{tick:g}</text>')
    return "".join(parts)


def _at(ratio: float) -> float:
    """Where a ratio is drawn; what lies beyond an edge, at the edge."""
    share = math.log(min(max(ratio, _LEAST), _MOST) / _LEAST) / math.log(_MOST / _LEAST)
    return _NAMES + share * _PLOT


def _row(part: Part, row: Row, y: int) -> str:
    if isinstance(row, Absent):
        return _names(row.against, y) + _words(row.why, y, _NEUTRAL, _NAMES + 6, 100)
    outcome, words = verdict(part, row)
    colour = _COLOURS[outcome] if outcome else _NEUTRAL
    if isinstance(row, Counted):
        colour = _COLOURS["equal"] if row.ours is None else colour
        bar = _PLOT * row.right / max(1, row.of)
        return (
            f"{_names(row.against, y)}"
            f'<rect class="all" x="{_NAMES}" y="{y - 11}" width="{_PLOT}" height="13"/>'
            f'<rect fill="{colour}" x="{_NAMES}" y="{y - 11}" width="{bar:.1f}" height="13"/>'
            + _words(f"{row.right} of {row.of}{words and f': {words}'}", y, colour)
        )
    low, middle, high = (_at(x) for x in (row.low, row.ratio, row.high))
    return (
        f"{_names(f'{row.ours} / {row.against}', y)}"
        f'<path stroke="{colour}" stroke-width="3" d="M{low:.1f},{y - 4}H{high:.1f}"/>'
        f'<circle fill="{colour}" cx="{middle:.1f}" cy="{y - 4}" r="4"/>'
        + _words(f"{row.ratio:.3f} ({row.low:.3f} to {row.high:.3f}): {words}", y, colour)
    )


def _names(text: str, y: int) -> str:
    return f'<text x="{_NAMES - 10}" y="{y}" text-anchor="end">{escaped(_cut(text, 66))}</text>'


def _words(text: str, y: int, colour: str, x: int = _NAMES + _PLOT + 12, most: int = 72) -> str:
    return f'<text x="{x}" y="{y}" style="fill:{colour}">{escaped(_cut(text, most))}</text>'


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
