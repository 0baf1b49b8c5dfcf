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

PICTURES = "pictures"  # in a run folder: what rows of kind "hook" name by its path from there

# What rows say of themselves, and trackers of rows; the beginnings of figures that a run adds to its metrics.
OWN = frozenset(
    {
        *("kind", "step", "epoch", "time", "seconds", "samples_per_s", "updates"),
        *("slow_rank", "slow_phase", "at", "text", "cause"),
    }
)
# Figures of train records that are averages of the record's span, by name or by beginning, and the span: its
# seconds, those since the record before, or its steps. Merged, they are a total over the total span.
SPAN_OF_RATES = {
    **dict.fromkeys(("samples_per_s", "tokens_per_s", "flops_per_s", "mfu"), "seconds"),
    **dict.fromkeys(("cpu/", "gpu/", "disk/", "network/", "loader/", "slow_excess"), "time/wall"),
    **dict.fromkeys(("loss", "loss/", "watched/"), "step"),
}
_SPANS = ("seconds", "time/wall")
_LONGEST_SPAN = 1e12  # seconds; beyond it a file was made up


def span_of(name: str) -> str:
    """Returns the span of a rate, by its name; "" for other figures."""
    head, slash, _ = name.partition("/")
    return SPAN_OF_RATES.get(head + slash, "")


def length_of(span: str, row: Mapping[str, object], steps: int) -> float:
    """Returns the length of a record's span.

    Args:
        span: From `span_of`.
        row: The record. Older ones don't have all spans: then the next best is taken, at last the steps.
        steps: Steps since the record before.
    """
    for name in (span, *_SPANS) if span != "step" else ():
        value = row.get(name)
        if type(value) in (int, float) and 0 < value < _LONGEST_SPAN:  # type: ignore[operator]
            return float(value)  # type: ignore[arg-type]
    return float(max(1, steps))


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
