"""Promise: the GPU targets are measured in pieces that resume where the last one ended, promises first."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import targets_run
from benchmarks.__main__ import main
from benchmarks.targets import Step
from benchmarks.targets_parts import main as part

ROW = {"kind": "end", "samples_per_s": 200.0, "time/wall": 1.0, "mfu": 0.6, "gpu/utilization": 0.95}
FOUND: dict[str, Any] = {
    "synchronizations": {"waits": 0, "steps": 20},
    "cuts": {"cuts": 20, "same": 20},
    "start-memory": {"kept": 0, "measured": True},
    "checkpoints": [{**ROW, "kind": "train", "time/checkpoint": 0.001}] * 3,
}


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A GPU on which each step takes a minute; the steps that were done."""
    steps: list[str] = []
    minutes = [0.0]

    def take(step: Step, _: Path, within: float) -> Any:
        assert within > 0
        minutes[0] += 100
        steps.append(step.key)
        if step.key not in FOUND:
            raise ValueError("broken")
        return FOUND[step.key]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr("benchmarks.conditions.conditions", lambda: "a machine")
    monkeypatch.setattr(targets_run, "_done", take)
    monkeypatch.setattr("benchmarks.targets_run.time.monotonic", lambda: minutes[0])
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    return steps


def test_pieces_go_on_where_the_last_one_ended(
    done: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["targets", "--out", str(tmp_path)]
    assert main([*words, "--only", "waits,cuts"]) == 0
    shown = capsys.readouterr().out
    assert "| 0 in 20 steps | met |" in shown and "| 20 of 20 cuts end with the same bits | met |" in shown
    assert "not measured (graphs): scripts/bench_gpu.sh --piece 2 |" in shown
    folder = tmp_path / "NVIDIA-H200"
    assert set(json.loads((folder / "results.json").read_text())) == {"synchronizations", "cuts"}
    assert (folder / "table.md").read_text() in shown
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(str(folder))
    assert main([*words, "--piece", "1"]) == 0
    assert done == ["synchronizations", "cuts", "start-memory", "checkpoints"], "none a second time"
    assert main([*words, "--only", "gpt2,stall"]) == 3
    assert done[4:] == ["gpt2"]
    assert "gpt2" not in json.loads((folder / "results.json").read_text()), "it may be tried again"


@pytest.mark.slow
def test_a_start_leaves_nothing_behind(capsys: pytest.CaptureFixture[str]) -> None:
    assert part(["start-memory"]) == 0
    assert json.loads(capsys.readouterr().out)["kept"] == 0
