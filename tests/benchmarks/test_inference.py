"""Promise: what the bench `inference` times computes what the trained model does, or isn't timed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.__main__ import main
from benchmarks.inference import WAYS, Unavailable, Way, make_way
from trainer.train.model_of_run import inputs_of, open_run, read_samples, some_samples


@pytest.fixture
def run(digits_run: Path) -> Path:
    return digits_run


def bench(run: Path, *words: str, code: int = 0) -> None:
    assert main(["inference", str(run), "--seconds", "0.01", *words]) == code


def test_every_way_is_measured_or_says_why_not(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Compiling takes half a minute: the test below.
    ways = [name for name in WAYS if name != "compiled"]
    bench(run, "--batches", "1", "--ways", ",".join(ways), "--json")
    told = json.loads(capsys.readouterr().out)
    assert "torch" in told["conditions"]
    assert [(one["batch"], one["way"]) for one in told["figures"]] == [(1, way) for way in ways]
    missing = {one["way"]: one["why"] for one in told["figures"] if one["why"]}
    assert "CUDA graphs" in missing.pop("reduce-overhead")
    assert set(missing) <= {"onnx", "bf16"}, missing
    for one in told["figures"]:
        if not one["why"]:
            assert 0 < one["p50"] <= one["p99"]
            assert one["calls"] >= 5
            assert 0 < one["samples_per_s"] <= one["batch"] / one["p50"] * 2
            assert one["error"] < (2e-2 if one["way"] == "bf16" else 1e-4)


@pytest.mark.slow
def test_compiled_computes_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench(run, "--batches", "4", "--ways", "compiled", "--json")
    eager, compiled = json.loads(capsys.readouterr().out)["figures"]
    assert eager["why"] == compiled["why"] == ""
    assert 0 < compiled["error"] < 1e-4


def test_a_way_that_computes_something_else_isnt_timed(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(model: nn.Module, _: Any) -> Any:
        return lambda *values: model(*values) * 1.01

    monkeypatch.setitem(WAYS, "frozen", Way(wrong))
    bench(run, "--batches", "2,5", "--ways", "frozen,torch-export", code=1)
    lines = capsys.readouterr().out.splitlines()
    for batch in (2, 5):
        (line,) = (line for line in lines if line.startswith(f"| frozen | {batch}"))
        assert "WRONG: differs from eager by 1" in line
        (line,) = (line for line in lines if line.startswith(f"| torch-export | {batch}"))
        assert float(line.split("|")[3]) > 0


def test_what_torch_cant_do_is_told(run: Path) -> None:
    opened = open_run(run)
    inputs = inputs_of(
        opened, read_samples(opened.task.evaluation_data, some_samples(opened.task.evaluation_data, 2))
    )

    class Decides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(Unavailable, match="torch can't"):
        make_way("torch-export", Decides(), inputs)
    with pytest.raises(Unavailable, match="no images"):
        make_way("channels_last", nn.Linear(8, 8), (torch.zeros(2, 8),))


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--ways", "egaer"], 2, "did you mean 'eager'"),
        (["--batches", "1,x"], 2, "1,8,64"),
        (["--batches", "0"], 2, "from 1"),
        (["--seconds", "0"], 3, "nothing measured"),
    ],
)
def test_what_cant_be_asked_for_is_one_line(
    words: list[str], code: int, said: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench(run, *words, code=code)
    told = capsys.readouterr()
    assert (told.out + told.err).count("\n") == 1
    assert said in told.out + told.err
