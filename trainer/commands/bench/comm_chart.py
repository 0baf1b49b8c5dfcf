"""The figures of `trainer bench comm` as curves in one SVG file, which nothing else is needed to see."""

from collections.abc import Sequence

from trainer.commands.bench.comm_fit import Found, Timed, bus_factor
from trainer.observe.charts.axis import Axis, make_axis
from trainer.observe.charts.lines import HEIGHT, STRETCHED, Line, axes, curve
from trainer.observe.charts.thin import Cell
from trainer.observe.text import escaped, scaled, size

_LEFT, _TOP, _WIDE, _BELOW, _RIGHT = 70, 66, 620, 70, 30  # CSS pixels
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.faint,.tick,.axis{fill:#767676}"
    "path{fill:none;stroke:currentColor;stroke-width:1.6;vector-effect:non-scaling-stroke}"
    "path.dot{stroke-width:5;stroke-linecap:round}path.band{fill:currentColor;fill-opacity:.16;stroke:none}"
    ".grid{stroke:#dcdcd5}.base{stroke:#8c9299}.c0{color:#0064a2}.c1{color:#bd4a00}"
    ".small{font-size:10px}.limit{color:#767676}.limit path{stroke-dasharray:5 4}"
)
_COLOURS = ("#0064a2", "#bd4a00", "#767676")


def chart(found: Found) -> str:
    """Bus bandwidth over the size of the message, by dtype, with the fitted line and the link's limit."""
    timed, fit, limit, factor = found.timed, found.fit, found.limit, bus_factor(found.ranks)
    title = f"bus bandwidth of an all-reduce over {found.ranks} ranks, {found.backend}"
    lines = [
        Line(name, [(one.bytes, _cell(factor, one)) for one in series], number)
        for number, (name, series) in enumerate(timed.items())
    ]
    sizes = sorted({one.bytes for series in timed.values() for one in series})
    named = [(line.name, _COLOURS[line.look]) for line in lines]
    if fit:
        fitted = [factor * one / fit.seconds(one) for one in sizes]
        points = [(one, Cell(rate, rate, rate, 1)) for one, rate in zip(sizes, fitted, strict=True)]
        lines.append(Line("fit", points, -1))
        named.append(("fit" if not limit[0] else "fit, and the limit (level)", _COLOURS[2]))
    if limit[0]:
        lines.append(Line("limit", [(one, Cell(limit[0], limit[0], limit[0], 1)) for one in sizes], -1))
    highest = max(cell.high for line in lines for _, cell in line.points)
    up, along = make_axis(0, highest, "si", "B/s", zero=True), _sizes_axis(sizes)
    key, x = "", _LEFT
    for name, colour in named:
        key += (
            f'<path d="M{x},40h18" style="stroke:{colour}"/><text x="{x + 24}" y="44">{escaped(name)}</text>'
        )
        x += 50 + 7 * len(name)
    told = "; ".join(
        f"{line.name}: {scaled(line.points[-1][1].mean, 'B/s')} at {size(line.points[-1][0])}"
        for line in lines
    )
    width, height = _LEFT + _WIDE + _RIGHT, _TOP + HEIGHT + _BELOW
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{escaped(told, 1000)}"><style>{_STYLE}</style>'
        f'<rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="10" y="20">{escaped(title)}</text>{key}'
        f'<text class="faint small" x="10" y="{height - 10}">{escaped(found.conditions)}</text>'
        f'<svg x="{_LEFT}" y="{_TOP}" width="{_WIDE}" height="{HEIGHT}" overflow="visible">'
        f"{axes(up, along, 'bytes of an all-reduce')}{STRETCHED}"
        f"{''.join(curve(line, up, along) for line in lines)}</svg></svg></svg>\n"
    )


def _cell(factor: float, one: Timed) -> Cell:
    low, mean, high = (factor * one.bytes / seconds for seconds in (one.high, one.seconds, one.low))
    return Cell(low, high, 2 * mean, 2)


def _sizes_axis(sizes: Sequence[int]) -> Axis:
    """A logarithmic axis with a label at most of the sizes that were measured."""
    every = -(-len(sizes) // 10)
    ticks = [(float(one), size(one)) for one in sizes[::every]]
    return Axis(sizes[0] / 1.15, sizes[-1] * 1.15, True, ticks, "")
