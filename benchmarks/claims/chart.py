"""The claims as one SVG file: each ratio with its interval, and what was claimed."""

import math
from collections.abc import Sequence

from benchmarks.claims.claim import Row
from benchmarks.claims.show import verdict
from trainer.observe.text import escaped

_NAMES, _PLOT, _ROW, _HEAD = 470, 380, 19, 64  # CSS pixels
_WIDTH = _NAMES + _PLOT + 330
_LEAST, _MOST = 0.1, 4.0  # ratios at the plot's edges
_TICKS = (0.1, 0.25, 0.5, 0.7, 1.0, 1.5, 2.0, 4.0)
_COLOURS = {"holds": "#007a52", "doesn't hold": "#d55e00", "undecided": "#8a6d00", "not measured": "#767676"}
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.faint{fill:#767676}.grid{stroke:#ddd}"
    ".one{stroke:#767676}.claimed{stroke:#222;stroke-width:2}"
)


def chart(title: str, rows: Sequence[Row]) -> str:
    """A row for each claim: a dot at the ratio, a line for its interval, a mark at what was claimed."""
    height = _HEAD + len(rows) * _ROW + 16
    parts = [
        f'<text class="faint" x="10" y="18">{escaped(title)}</text>',
        '<text class="faint" x="10" y="36">with the setting / without it, less is better; the upright '
        "mark is what was claimed, the line holds the true median with 95 % probability</text>",
    ]
    for tick in _TICKS:
        x = _at(tick)
        look = "one" if tick == 1 else "grid"
        parts.append(f'<path class="{look}" d="M{x:.1f},{_HEAD - 4}V{height - 10}"/>')
        parts.append(f'<text class="faint" x="{x:.1f}" y="{_HEAD - 8}" text-anchor="middle">{tick:g}</text>')
    parts += [_row(row, _HEAD + 14 + number * _ROW) for number, row in enumerate(rows)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" role="img"><style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>'
        f"{''.join(parts)}</svg>\n"
    )


def _at(ratio: float) -> float:
    """Where a ratio is drawn; what lies beyond an edge, at the edge."""
    share = math.log(min(max(ratio, _LEAST), _MOST) / _LEAST) / math.log(_MOST / _LEAST)
    return _NAMES + share * _PLOT


def _row(row: Row, y: int) -> str:
    colour = _COLOURS[row.verdict]
    claimed, judged = _at(row.claim.most), escaped(_cut(verdict(row), 52))
    parts = [
        f'<text x="{_NAMES - 10}" y="{y}" text-anchor="end">{escaped(_cut(row.claim.text, 74))}</text>',
        f'<path class="claimed" d="M{claimed:.1f},{y - 10}v12"/>',
        f'<text x="{_NAMES + _PLOT + 12}" y="{y}" style="fill:{colour}">{judged}</text>',
    ]
    if row.measured is not None:
        low, middle, high = (_at(x) for x in (row.measured.low, row.measured.ratio, row.measured.high))
        parts.append(f'<path stroke="{colour}" stroke-width="3" d="M{low:.1f},{y - 4}H{high:.1f}"/>')
        parts.append(f'<circle fill="{colour}" cx="{middle:.1f}" cy="{y - 4}" r="4"/>')
    return "".join(parts)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
