"""The files of a run's metrics records, one for each kind, and names. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path

# A row's kind, and the file in the run folder that holds such rows and no others.
FILES = {
    "train": "metrics.jsonl",
    "eval": "evaluations.jsonl",
    "answers": "answers.jsonl",
    "memory": "memory.jsonl",
    "hook": "hooks.jsonl",
    "verdict": "verdicts.jsonl",
    "end": "summary.jsonl",
}

TABLES = tuple(f"{kind}.csv" for kind in FILES)  # with csv in log.to

PICTURES = "pictures"  # in a run folder: what rows of kind "hook" name by its path from there

# What rows say of themselves, and trackers of rows; the beginnings of figures that a run adds to its metrics.
OWN = frozenset(
    {
        *("kind", "step", "epoch", "time", "seconds", "samples_per_s", "updates"),
        *("slow_rank", "slow_phase", "at", "text", "cause"),
    }
)
_OWN_PARTS = ("eval/", "time/", "energy/", "cost/")
_LONGEST = 120


def is_name(name: object) -> bool:
    """Returns True if a record can have a figure of this name: a short text that can be printed in a line."""
    return isinstance(name, str) and 0 < len(name) <= _LONGEST and name.isprintable() and name == name.strip()


def why_no_metric(name: object) -> str:
    """Returns why a name can't be a metric's; empty if it can."""
    if not is_name(name):
        return f"is no name for a metric: give a text of at most {_LONGEST} printable characters"
    if name in OWN or str(name).startswith(_OWN_PARTS):
        return "is what rows call a figure of their own: give the metric another name"
    return ""


def pictures_of(row: Mapping[str, object], folder: Path) -> list[tuple[str, Path]]:
    """Returns the pictures that a record names, as files of its run folder."""
    if row["kind"] != "hook":
        return []
    return [
        (name, folder / value) for name, value in row.items() if isinstance(value, str) and name != "kind"
    ]


def tag(kind: str, name: str) -> str:
    """Returns the name of a figure in TensorBoard and trackers: kind/name, the kind only once."""
    return name if name.startswith(f"{kind}/") else f"{kind}/{name}"
