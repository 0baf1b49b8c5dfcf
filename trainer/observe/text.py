"""Values as people read them, and as HTML may hold them."""

import html
import math
import re
from collections.abc import Collection, Sequence
from typing import Any

from trainer.config.redact import redact_text
from trainer.config.sizes import GIB, KIB, MIB, TIB

# What is looked at of a text, before secrets are taken out and what is left is cut.
_READ = 1 << 14
_ITEMS = 64
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])")
# Control characters, surrogates, what turns the direction of text around, and what no browser shows.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]"
)
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")

_PREFIXES = (
    (1e24, "Y"),
    (1e21, "Z"),
    (1e18, "E"),
    (1e15, "P"),
    (1e12, "T"),
    (1e9, "G"),
    (1e6, "M"),
    (1e3, "k"),
)
_BINARY = ((1 << 50, "PiB"), (TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
_MINUS = "\u2212"
DASH = "\u2013"  # where there is no figure
_SPACE = "\u00a0"  # between a figure and its unit: no line breaks there


def plain(value: Any, most: int = 300) -> str:
    """A value as text of one meaning: no secrets, no escape sequences, nothing invisible, not endless."""
    text = value if isinstance(value, str) else _simple(value)
    text = redact_text(
        _ESCAPES.sub("", text[:_READ]).encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    )
    text = _INVISIBLE.sub("\ufffd", text)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def without_controls(text: str) -> str:
    """A text that leaves a terminal as it is, whoever named what is in it; lines and tabs stay."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def printable(text: str) -> str:
    """Replaces what isn't printed in a model's output or a sample of data, such as a terminal's controls."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in text)


def seconds_left(steps: int, step: int, first: int, seconds: float) -> float:
    """Estimates the time until the last step, from the steps since `first` and their seconds."""
    return seconds / max(1, step - first) * (steps - step)


def escaped(value: Any, most: int = 300) -> str:
    """`plain`, for HTML: within elements and within quoted attributes."""
    return html.escape(plain(value, most), quote=True)


def _simple(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return DASH if value is None else "yes" if value else "no"
    if isinstance(value, int):
        return (
            str(value) if abs(value) < 10**18 else number(float(value) if abs(value) < 10**300 else math.inf)
        )
    if isinstance(value, float):
        return number(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_short(item) for item in value[:_ITEMS])}{', …' * (len(value) > _ITEMS)}]"
    if isinstance(value, dict):
        items = [f"{_short(key)}: {_short(item)}" for key, item in list(value.items())[:_ITEMS]]
        return f"{{{', '.join(items)}{', …' * (len(value) > _ITEMS)}}}"
    return str(value)


def _short(value: Any) -> str:
    return value[:_READ] if isinstance(value, str) else _simple(value)


def enumerated(words: Sequence[str], most: int) -> str:
    """Lists words, at most so many of them: "0, 1 and 3 more"."""
    shown = words if len(words) <= most else [*words[: most - 1], f"{len(words) - most + 1} more"]
    return f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else shown[0]


def number(value: float, digits: int = 4) -> str:
    """Formats a figure with so many significant digits: 0.9917, 1,587, 5.06e-7."""
    if not math.isfinite(value):
        return "not finite"
    if value == 0:
        return "0"
    size = abs(value)
    if size < 1e-3 or size >= 1e9:
        mantissa, _, exponent = f"{value:.{digits - 2}e}".partition("e")
        return f"{_trimmed(mantissa)}e{int(exponent)}".replace("-", _MINUS)
    if size >= 10 ** (digits - 1):
        return f"{value:,.0f}".replace("-", _MINUS)
    decimals = digits - 1 - math.floor(math.log10(size))
    return _trimmed(f"{value:.{decimals}f}").replace("-", _MINUS)


def _trimmed(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def count(value: float) -> str:
    """A whole number: 1,234,567."""
    return f"{value:,.0f}".replace("-", _MINUS) if abs(value) < 1e15 else number(value)


def scaled(value: float, unit: str = "") -> str:
    """A figure with a decimal prefix: 12.3 TFLOP/s."""
    for factor, prefix in _PREFIXES:
        if abs(value) >= factor:
            return f"{number(value / factor, 3)}{_SPACE}{prefix}{unit}"
    return f"{number(value, 3)}{_SPACE}{unit}".rstrip()


def size(value: float) -> str:
    """Bytes: 688 MiB."""
    for factor, unit in _BINARY:
        if abs(value) >= factor:
            return f"{number(value / factor, 3)}{_SPACE}{unit}"
    return f"{value:.0f}{_SPACE}B"


def rough_size(value: float) -> str:
    """Bytes in two digits, for a terminal: 1.5 GiB, 64 MiB, 0 KiB."""
    for factor, unit in _BINARY[1:-1]:
        if value >= factor:
            return f"{value / factor:.{1 if value < 10 * factor else 0}f} {unit}".replace(".0 ", " ")
    return f"{value / KIB:.0f} KiB"


def memory_size(value: float) -> str:
    """Bytes that are compared with others, for a terminal: 1.52 GiB, 688 MiB."""
    return f"{value / GIB:,.2f} GiB" if value >= GIB else f"{value / MIB:,.0f} MiB"


def megabytes(value: float) -> str:
    """Bytes as data sets are measured: 9.6 MB, 87 MB, 1,024 MB."""
    return f"{value / 1e6:,.1f} MB" if value < 9.95e6 else f"{value / 1e6:,.0f} MB"


def share(value: float) -> str:
    """A part of one, as percent: 41 %, 0.4 %, 0 %."""
    percent = 100 * value
    if abs(percent) >= 1e6:
        return f"{number(percent)}{_SPACE}%"
    if 0 < abs(percent) < 0.05:
        return f"<{_SPACE}0.1{_SPACE}%"
    return f"{percent:.{0 if abs(percent) >= 9.95 or percent == 0 else 1}f}{_SPACE}%".replace("-", _MINUS)


def duration(seconds: float) -> str:
    """A time: 4.4 s, 12 min 30 s, 3 h 20 min, 2 d 4 h."""
    if abs(seconds) >= 1e10:
        return f"{number(seconds)}{_SPACE}s"
    if abs(seconds) < 1:
        return f"{number(1000 * seconds, 3)}{_SPACE}ms" if seconds else f"0{_SPACE}s"
    if abs(seconds) < 99.5:
        return f"{number(seconds, 3)}{_SPACE}s"
    for large, long, small, short in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if seconds >= long:
            whole, rest = divmod(round(seconds / short), long // short)
            return f"{whole:,}{_SPACE}{large} {rest}{_SPACE}{small}" if rest else f"{whole:,}{_SPACE}{large}"
    return f"{seconds:.0f}{_SPACE}s"


def age(seconds: float) -> str:
    """Returns an age in one unit, at least two of it: 119 s, 2 min, 47 h, 3 d."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def table(names: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """Lines below a heading; columns are right-aligned but for those that are named as `left`."""
    cells = [names, *([" ".join(plain(cell).split()) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        "  ".join(
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)
