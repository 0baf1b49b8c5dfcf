"""Promise: what a GPU is asked for is measured row after row, and a call goes on where the last one ended."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from benchmarks.gpu import ROWS, Step, judged, measure
from benchmarks.gpu_parts import main as part

FOUND: dict[str, Any] = {"synchronizations": {"waits": 0, "steps": 20}, "cuts": {"cuts": 20, "same": 19}}
FOUND["start-memory"] = {"kept": 0, "measured": True}


def rows(*keys: str) -> list[gpu.Row]:
    return [row for row in ROWS if row.key in keys]


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Steps that were run, each in a minute."""
    steps, minutes = list[str](), [0.0]

    def take(step: Step, *_: object) -> Any:
        minutes[0] += 60
        steps.append(step.key)
        if step.key not in FOUND:
            raise ValueError("broken")
        return FOUND[step.key]

    monkeypatch.setattr(gpu, "result_of", take)
    monkeypatch.setattr("benchmarks.gpu.time.monotonic", lambda: minutes[0])
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(Path("unused").absolute()))
    return steps


def test_a_call_goes_on_where_the_last_one_ended(done: list[str], tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"

    def call(*keys: str, limit: float = 1000.0) -> int:
        return measure(rows(*keys), file, tmp_path, limit)

    assert call("cuts", "waits", "start-memory", limit=100.0) == 1
    assert done == ["cuts", "start-memory"], "in the order of the list, and none after the limit"
    assert set(json.loads(file.read_text())["results"]) == {*done}
    assert call("waits", "start-memory") == 0
    assert done[2:] == ["synchronizations"], "none a second time"
    assert call("graphs") == 3 and call("graphs") == 3
    assert done[3:] == ["graphs", "graphs"], "one that failed is tried again"
    other = json.loads(file.read_text()) | {"card": "another"}
    file.write_text(json.dumps(other))
    assert call("waits") == 0
    assert done[5:] == ["synchronizations"], "figures of two cards are never mixed"


def test_each_row_says_what_is_missing() -> None:
    assert len({row.key for row in ROWS}) == len(ROWS)
    for row in ROWS:
        said, met = judged(row, {})
        assert met is None and all(step.key in said for step in row.steps)


@pytest.mark.slow
@pytest.mark.parametrize("words", [["start-memory"], ["gpt2"], ["faults"], ["timm", "digits"]])
def test_the_parts_run_on_a_cpu(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert part(words) == 0
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert found.get("kept", 0) == 0 and found.get("close", True)
    assert not any(one["as_set"] for one in found.get("faults", {}).values())
