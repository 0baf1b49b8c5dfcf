"""Prints the doctor's findings: problems first."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.text import Text

from trainer.commands.doctor.facts import CheckResult, Environment
from trainer.config.redact import redact_text
from trainer.host.reading import kind_of
from trainer.observe.text import without_controls

_COLORS = {"bad": "red", "warn": "yellow"}


def print_findings(found: Mapping[str, CheckResult], place: Environment, seconds: float) -> None:
    """Prints each problem with the remedy for this place, then the number of checks that passed."""
    console = Console()
    for name, one in sorted(found.items(), key=lambda item: item[1].status != "bad"):
        if one.status in _COLORS:
            lines = (f"{one.status:<5} {name}: {one.finding}", f"cause: {one.cause}", one.remedy(place))
            first, *more = (without_controls(redact_text(line).replace("\n", " ")) for line in lines)
            # A remedy is one line, however long: it is copied.
            console.print(Text(first, _COLORS[one.status]), soft_wrap=True)
            for line in more:
                console.print(Text(f"      {line}"), soft_wrap=True)
    print(found_summary(found, seconds))


def surroundings(environ: Mapping[str, str], root: Path = Path("/")) -> Environment:
    """Returns where this process runs: in a Slurm job, a pod, another container, or on the machine itself."""
    if "SLURM_JOB_ID" in environ:
        return "slurm"
    if "KUBERNETES_SERVICE_HOST" in environ or kind_of(root / "var/run/secrets/kubernetes.io"):
        return "kubernetes"
    marks = (root / ".dockerenv", root / "run/.containerenv")
    return "container" if any(kind_of(mark) for mark in marks) else "host"


def found_summary(found: Mapping[str, CheckResult], seconds: float) -> str:
    """Says how many checks passed, and which weren't available."""
    counts = {
        status: [name for name, one in found.items() if one.status == status]
        for status in ("ok", "bad", "warn", "not available")
    }
    counted = [f"{len(counts['ok'])} checks fine"]
    counted += [f"{len(counts['bad'])} bad"] if counts["bad"] else []
    counted += [f"{len(counts['warn'])} to know"] if counts["warn"] else []
    if absent := counts["not available"]:
        counted.append(f"{len(absent)} not available here ({', '.join(absent)})")
    return f"{', '.join(counted)}; {seconds:.1f} s"
