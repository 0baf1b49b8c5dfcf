"""The metrics that a run wrote."""

import json
from pathlib import Path
from typing import Any

from trainer.observe.rows import FILES

# Verdicts depend on what else the machine did; memory is what it is.
LEARNED = ("train", "eval", "end")


def read_rows(folder: Path, kinds: tuple[str, ...] = LEARNED) -> list[dict[str, Any]]:
    """Rows of some kinds, or of all: (); by their steps, and at one step in the order of the kinds."""
    rows = []
    for kind in kinds or FILES:
        if (file := folder / FILES[kind]).exists():
            found = [json.loads(line) for line in file.read_text().splitlines()]
            assert {row["kind"] for row in found} <= {kind}, f"{file} is a table of its own"
            rows += found
    return sorted(rows, key=lambda row: int(row["step"]))
