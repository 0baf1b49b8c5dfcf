"""The figures of `trainer bench inference` as bars in one SVG file, which nothing else is needed to see."""

from collections.abc import Sequence

from trainer.commands.bench.inference_ways import Figure
from trainer.observe.text import escaped, number, scaled

_NAMES, _BARS, _ROW, _HEAD = 130, 320, 18, 54  # CSS pixels
_WIDTH = 2 * _NAMES + 2 * _BARS + 160
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.faint{fill:#767676}.bar{fill:#0072b2}.eager{fill:#999}"
    ".late{fill:none;stroke:#d55e00;stroke-width:2}"
)


def chart(title: str, figures: Sequence[Figure]) -> str:
    """Samples/s on the left, p50 and p99 on the right; each batch size has a scale of its own."""
    parts, y = list[str](), 44
    for batch in dict.fromkeys(figure.batch for figure in figures):
        shown = [figure for figure in figures if figure.batch == batch and not figure.why]
        if not shown:
            continue
        parts.append(f'<text x="10" y="{y}" font-weight="bold">batch {batch}</text>')
        parts.append(f'<text class="faint" x="{_NAMES}" y="{y}">samples/s</text>')
        parts.append(f'<text class="faint" x="{_right()}" y="{y}">ms: bar p50, mark p99</text>')
        fastest, slowest = max(f.samples_per_s for f in shown), max(f.p99 for f in shown)
        for figure in shown:
            y += _ROW
            parts.append(_row(figure, y, fastest, slowest))
        y += _HEAD - _ROW
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y}" width="{_WIDTH}" height="{y}" '
        f'role="img"><style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>'
        f'<text class="faint" x="10" y="18">{escaped(title)}</text>{"".join(parts)}</svg>\n'
    )


def _right() -> int:
    return _NAMES + _BARS + 80


def _row(figure: Figure, y: int, fastest: float, slowest: float) -> str:
    look = "eager" if figure.way == "eager" else "bar"
    speed = _BARS * figure.samples_per_s / fastest
    p50, p99 = (_right() + _BARS * value / slowest for value in (figure.p50, figure.p99))
    return (
        f'<text x="{_NAMES - 8}" y="{y}" text-anchor="end">{escaped(figure.way)}</text>'
        f'<rect class="{look}" x="{_NAMES}" y="{y - 11}" width="{speed:.1f}" height="13"/>'
        f'<text x="{_NAMES + speed + 5:.1f}" y="{y}">{scaled(figure.samples_per_s)}</text>'
        f'<rect class="{look}" x="{_right()}" y="{y - 11}" width="{p50 - _right():.1f}" height="13"/>'
        f'<path class="late" d="M{p99:.1f},{y - 12}v15"/>'
        f'<text x="{p99 + 5:.1f}" y="{y}">'
        f"{number(figure.p50 * 1e3, 3)} / {number(figure.p99 * 1e3, 3)}</text>"
    )
