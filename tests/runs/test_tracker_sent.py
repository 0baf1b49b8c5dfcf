"""Promise: records of steps that are repeated are sent to a tracker again only where they differ."""

from pathlib import Path
from typing import Any

import pytest

from trainer.runs.tracking.process import _Sent


def test_rows_after_a_rollback_are_sent_again_and_after_a_crash_they_are_not(tmp_path: Path) -> None:
    file = tmp_path / "tracker.json"
    rows: list[dict[str, Any]] = [{"kind": "train", "step": step} for step in (2, 4, 6, 8)]
    first = _Sent(file)
    first.begin("id", 0, 0)
    first.add(first.new(rows))
    crashed = _Sent(file)
    crashed.begin("id", 4, 0)
    assert crashed.new(rows) == []
    rolled_back = _Sent(file)
    rolled_back.begin("id", 4, 1)
    fresh = rolled_back.new(rows)
    assert [row["step"] for row in fresh] == [6, 8]
    rolled_back.add(fresh[:1])
    again = _Sent(file)  # killed after its first row
    again.begin("id", 4, 1)
    assert [row["step"] for row in again.new(rows)] == [8]


@pytest.mark.parametrize("steps", ["[]", "5", '{"train": "x"}', '{"train": []}', "null"])
def test_a_file_that_is_odd_says_nothing_of_what_was_sent(tmp_path: Path, steps: str) -> None:
    file = tmp_path / "tracker.json"
    file.write_text(f'{{"id": "id", "rows": 3, "steps": {steps}, "left_out": 0}}')
    sent = _Sent(file)
    sent.begin("id", 4, 1)
    assert (sent.rows, len(sent.new([{"kind": "train", "step": 1}]))) == (0, 1)
