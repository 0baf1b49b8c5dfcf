"""Templates of pages, and their filters for values. They escape all values that aren't `Markup`."""

import time
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from trainer.observe.text import DASH, count, duration, plain, share, size
from trainer.runs.report.read import REPLACED

_ITEMS = 20


def short_hash(value: Any) -> Markup | str:
    """Shortens a hash; the whole is its tooltip."""
    if not isinstance(value, str) or not value:
        return "unknown"
    start, _, end = value.rpartition(":")
    short = f"{start}:" * bool(start) + end.rstrip("+")[:12] + "+" * end.endswith("+")
    return Markup('<code title="{}">{}</code>').format(plain(value), plain(short, 60))


def moment(value: Any) -> str:
    """Formats a time of the manifest."""
    return plain(value, 40).replace("T", " ") if isinstance(value, str) else DASH


def items(value: Any) -> list[Any]:
    """Returns a list of the manifest; [] if the value is none."""
    return value if isinstance(value, list) else []


def pairs(value: Any) -> list[tuple[str, Any]]:
    """Returns the first keys of a section of the manifest, with their values; [] for anything else."""
    return list(value.items())[:_ITEMS] if isinstance(value, dict) else []


def _local(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(min(max(seconds, 0.0), 4e9)))


templates = Environment(
    autoescape=True,
    loader=PackageLoader("trainer.runs.report"),
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
templates.filters |= {
    **{"text": plain, "count": count, "size": size, "share": share, "duration": duration, "local": _local},
    **{"hash": short_hash, "moment": moment, "items": items, "pairs": pairs},
}
templates.globals["replaced"] = REPLACED


def html(macro: str, *values: object, **named: object) -> Markup:
    """Renders a macro, by its file and name, such as "parts.section"."""
    file, _, name = macro.partition(".")
    return Markup(getattr(templates.get_template(f"{file}.html").module, name)(*values, **named).strip())
