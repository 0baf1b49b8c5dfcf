"""The files of a run's rows: one for each kind, so that each is a table. Imports no torch."""

# A row's kind, and the file in the run folder that holds such rows and no others.
FILES = {
    "train": "metrics.jsonl",
    "eval": "evaluations.jsonl",
    "memory": "memory.jsonl",
    "layers": "layers.jsonl",
    "verdict": "verdicts.jsonl",
    "end": "summary.jsonl",
}


def tag(kind: str, name: str) -> str:
    """What a figure of a row is called in TensorBoard and by trackers: kind/name, once."""
    return name if name.startswith(f"{kind}/") else f"{kind}/{name}"
