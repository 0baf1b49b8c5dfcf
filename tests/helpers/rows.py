"""The metrics that a run wrote."""

import json
from pathlib import Path
from typing import Any

# Verdicts depend on what else the machine did; memory is what it is.
LEARNED = ("train", "evaluation", "end")


def read_rows(folder: Path, kinds: tuple[str, ...] = LEARNED) -> list[dict[str, Any]]:
    """Rows of some kinds, or of all: ()."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if not kinds or row["kind"] in kinds]
