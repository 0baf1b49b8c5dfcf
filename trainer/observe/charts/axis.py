"""Axes: positions of values between the ends, and labels."""

import math
from typing import Literal, NamedTuple

from trainer.config.sizes import GIB, KIB, MIB, TIB
from trainer.observe.text import number

AxisKind = Literal["number", "count", "si", "share", "bytes"]
# A range that spans this factor is shown on a logarithmic axis, where that is possible.
_WIDE = 20.0
# A share above all of it by so little is measured so: a clock, or the rounding of a mean.
_ABOUT_ALL = 1.05
# What is nearer to 0 is shown there: no arithmetic here loses itself among subnormal numbers.
_LEAST = 1e-100
_LARGE = 1e9  # from here on labels are powers of ten
_BYTES = ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"), (1, "B"))
_DECIMAL = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


class Axis(NamedTuple):
    """An axis.

    Attributes:
        low: The value at its start, in the unit of the data.
        high: The value at its end.
        log: Whether it is logarithmic.
        ticks: Values and their labels.
        unit: Unit of the labels, such as "GiB"; may be empty.
        factor: Value that a label of 1 stands for.
        letter: Suffix of each label, such as "k".
    """

    low: float
    high: float
    log: bool
    ticks: list[tuple[float, str]]
    unit: str
    factor: float = 1.0
    letter: str = ""

    def text(self, value: float) -> str:
        """Formats a value in the unit of the axis."""
        return number(value / self.factor, 4 if abs(value / self.factor) < 10 else 3) + self.letter * (
            value != 0
        )

    def at(self, value: float) -> float:
        """Returns a value's position from 0 (start) to 1 (end); values beyond an end lie at it."""
        if self.log:
            if value <= 0:
                return 0.0
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, part))


def make_axis(
    low: float,
    high: float,
    kind: AxisKind = "number",
    unit: str = "",
    zero: bool = False,
    may_log: bool = False,
) -> Axis:
    """Makes an axis for a range, with round ticks.

    Args:
        low: The least value.
        high: The largest.
        kind: Format of values: fractions as percent, bytes and "si" with a prefix of the unit, counts with k
            and M beside the numbers.
        unit: Unit after the prefix, such as "samples/s".
        zero: Whether it starts at 0.
        may_log: Whether it may be logarithmic: it is for a wide range.
    """
    low, high = (0.0 if abs(value) < _LEAST else value for value in (low, high))
    if kind == "share" and 1 < high <= _ABOUT_ALL:
        low, high = min(low, 1.0), 1.0
    if may_log and low > 0 and high / low > _WIDE:
        return _logarithmic(low, high, unit)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        margin, largest_share = abs(high) / 2 or 1.0, high
        low, high = (low if zero and high >= 0 else low - margin), high + margin
        if kind == "share" and 0 <= largest_share <= 1:  # none is more than all
            low, high = max(low, 0.0), min(high, 1.0)
    largest = max(abs(low), abs(high))
    factor, prefix = _unit(kind, largest)
    step = _round_step((high - low) / factor / 4)
    if kind == "share" and zero and 0.5 < high <= 1:
        high, step = 1.0, 25.0
    first, last = math.floor(low / factor / step + 1e-9), math.ceil(high / factor / step - 1e-9)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    letter, prefix = (prefix, "") if kind == "count" else ("", prefix)
    large = largest / factor >= _LARGE
    ticks = [
        (n * step * factor, _multiple(n, step) if large else _tick(n * step, decimals) + letter * (n != 0))
        for n in range(first, last + 1)
    ]
    return Axis(ticks[0][0], ticks[-1][0], False, ticks, f"{prefix}{unit}", factor, letter)


def _multiple(count: int, step: float) -> str:
    """Formats so many steps of 1, 2 or 5 times a power of ten, such as 3 of 5e28: 1.5·10²⁹."""
    exponent = math.floor(math.log10(step) + 1e-9)
    digits = str(abs(count) * round(step / 10.0**exponent))
    exponent += len(digits) - 1
    lead = f"{digits[0]}.{digits[1:]}".rstrip("0").rstrip(".")
    sign = "\u2212" * (count < 0)
    return f"{sign}{lead}\u00b710{_raised(exponent)}" if count else "0"


def _tick(value: float, decimals: int) -> str:
    if decimals > 4:
        # As many digits as it takes to tell neighbors apart.
        exponent = math.floor(math.log10(abs(value))) if value else 0
        return number(value, max(3, exponent + decimals + 2))
    return f"{value:,.{decimals}f}".replace("-", "\u2212")


def _unit(kind: AxisKind, largest: float) -> tuple[float, str]:
    if kind == "share":
        return 0.01, "%"
    if kind == "number":
        return 1.0, ""
    if kind == "count" and largest < 10_000:
        return 1.0, ""
    units = _BYTES if kind == "bytes" else _DECIMAL
    return next(
        ((float(factor), prefix) for factor, prefix in units if largest >= factor),
        (1.0, "B" * (kind == "bytes")),
    )


def _round_step(rough: float) -> float:
    """Rounds up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(max(rough, 1e-250)))
    return next((m * power for m in (1, 2, 5) if m * power >= rough * (1 - 1e-9)), 10 * power)


def _logarithmic(low: float, high: float, unit: str) -> Axis:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, -(-(last - first) // 6))
    steps = (1, 2, 5) if last - first <= 3 else (1,)
    values = [(step, n) for n in range(first, last + 1, every) for step in steps]
    low, high = low / 1.15, high * 1.15
    values = [(step, n) for step, n in values if low <= step * 10.0**n <= high]
    ticks = [(step * 10.0**n, _power(step, n)) for step, n in values]
    return Axis(low, high, True, ticks, unit)


def _power(step: int, exponent: int) -> str:
    if -3 <= exponent <= 4:
        return _tick(step * 10.0**exponent, max(0, -exponent))
    return ("10" if step == 1 else f"{step}\u00b710") + _raised(exponent)


def _raised(exponent: int) -> str:
    raised = "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"
    return str(exponent).translate(str.maketrans("-0123456789", raised))


def step_axis(last: int) -> Axis:
    """Makes an axis over the steps of a run, from 0 to exactly the last one."""
    high = float(max(last, 1))
    factor = next(f for f in (1e9, 1e6, 1e3, 1.0) if high >= 10 * f or f == 1.0)
    letter = {1e9: "G", 1e6: "M", 1e3: "k", 1.0: ""}[factor]
    step = max(_round_step(high / factor / 5), 1.0 if factor == 1.0 else 1e-3)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    ticks = [
        (n * step * factor, f"{n * step:,.{decimals}f}{letter if n else ''}")
        for n in range(math.floor(high / factor / step + 1e-9) + 1)
    ]
    return Axis(0.0, high, False, ticks, "")
