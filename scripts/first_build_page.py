"""The section of docs/results/image.md about a first build."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

BEGIN, END = "<!-- make first-build writes from here", "<!-- to here -->"


class Row(NamedTuple):
    """A step that passed: its result, duration, and the disk that was free after it."""

    name: str
    saw: str
    seconds: float
    free_gb: float


def section(stack: str, commit: str, begun: datetime, rows: Sequence[Row]) -> str:
    """Returns the section of docs/results/image.md about the stack."""
    table = [
        f"| {row.name} | {row.saw.replace('|', '/')} | {row.seconds:.0f} | {row.free_gb:.0f} |"
        for row in rows
    ]
    lines = [
        f"{BEGIN} -->",
        "## The first build with the real bases",
        "",
        f"`make first-build STACK={stack}` of commit {commit}, {begun:%Y-%m-%d %H:%M} UTC.",
        "",
        "| step | what it saw | s | GB free after it |",
        "|---|---|---|---|",
        *table,
        END,
    ]
    return "\n".join(lines) + "\n"


def write_page(page: Path, text: str) -> None:
    """Puts the section in place of the last one, or at the page's end."""
    old = page.read_text() if page.is_file() else "# The image, measured\n"
    before, found, rest = old.partition(BEGIN)
    if found:
        page.write_text(before + text + rest.partition(f"{END}\n")[2])
    else:
        page.write_text(f"{old.rstrip()}\n\n{text}")
