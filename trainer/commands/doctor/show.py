"""What the doctor found, for people: problems first."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainer.commands.doctor.facts import Finding
from trainer.config.redact import redact_text
from trainer.host.reading import kind_of

_COLOURS = {"bad": "red", "warn": "yellow"}
_NAMES = {
    "kubernetes": "Kubernetes",
    "slurm": "Slurm",
    "docker": "docker",
    "compose": "compose",
    "host": "here",
}


def show(found: Mapping[str, Finding], environ: Mapping[str, str], seconds: float) -> None:
    """Prints a table on a terminal, plain lines elsewhere."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a locale that has no … is among what is looked for
    console = Console()
    places = surroundings(environ)
    if console.is_terminal:
        _table(console, found, places)
    else:
        for line in plain(found, places):
            print(line)
    for line in summary(found, seconds):
        print(line)


def surroundings(environ: Mapping[str, str], root: Path = Path("/")) -> tuple[str, ...]:
    """Whose lines are of use here: in a job those of Slurm, in a pod of Kubernetes, and so on."""
    found = ["slurm"] if "SLURM_JOB_ID" in environ else []
    secrets = root / "var/run/secrets/kubernetes.io"
    if "KUBERNETES_SERVICE_HOST" in environ or kind_of(secrets):
        found.append("kubernetes")
    marks = (root / ".dockerenv", root / "run/.containerenv")
    if not found and any(kind_of(mark) for mark in marks):
        found = ["docker", "compose"]
    return tuple(found) or ("host",)


def remedies(found: Finding, places: tuple[str, ...]) -> list[tuple[str, str]]:
    """Where to write what, and what: those of these surroundings, or else all that there are."""
    chosen = [place for place in places if place in found.remedy] or list(found.remedy)
    return [(_NAMES.get(place, place), _line(found.remedy[place])) for place in chosen]


def plain(found: Mapping[str, Finding], places: tuple[str, ...]) -> Iterator[str]:
    """The problems as lines."""
    for name, one in _problems(found):
        yield f"{one.status:<5} {name}: {_line(one.finding)}"
        yield f"      cause: {_line(one.cause)}"
        for where, line in remedies(one, places):
            yield f"      {where}: {line}"


def summary(found: Mapping[str, Finding], seconds: float) -> Iterator[str]:
    """How many checks found nothing, and which couldn't look."""
    counts = {
        status: [name for name, one in found.items() if one.status == status]
        for status in ("ok", "warn", "bad", "not available")
    }
    problems = ", ".join(
        f"{len(counts[status])} {word}"
        for status, word in (("bad", "bad"), ("warn", "to know"))
        if counts[status]
    )
    absent = counts["not available"]
    without = f", {len(absent)} not available here ({', '.join(absent)})" if absent else ""
    yield f"{len(counts['ok'])} checks fine{f', {problems}' if problems else ''}{without}; {seconds:.1f} s"


def _problems(found: Mapping[str, Finding]) -> list[tuple[str, Finding]]:
    wrong = [(name, one) for name, one in found.items() if one.status in _COLOURS]
    return sorted(wrong, key=lambda item: item[1].status != "bad")


def _table(console: Console, found: Mapping[str, Finding], places: tuple[str, ...]) -> None:
    """What is wrong as a table; the remedies as lines below, whole, so that they can be copied."""
    if not _problems(found):
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("", "check", "finding", "cause"):
        table.add_column(heading, overflow="fold")
    for name, one in _problems(found):
        row = (one.status, name, _line(one.finding), _line(one.cause))
        table.add_row(*(Text(cell) for cell in row), style=_COLOURS[one.status])
    console.print(table)
    console.print("\nto mend it:", style="bold")
    for name, one in _problems(found):
        for where, line in remedies(one, places):
            console.print(Text(f"{name}  {where}: {line}"), soft_wrap=True)
    console.print()


def _line(text: str) -> str:
    """One line, whatever a variable held that is told in it; without secrets."""
    return redact_text(text).replace("\n", " ")
