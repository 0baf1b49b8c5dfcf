"""Promise: the cost of a setting is measured in alternation and judged by its interval."""

from typing import Any

import pytest

from benchmarks import setting
from benchmarks.setting import bench_setting
from tests.helpers.clock import Clock
from trainer.train.state import Run
from trainer.train.step import train_step

Capsys = pytest.CaptureFixture[str]
SMALL = ["data.global_batch_size=16", "data.micro_batch_size=4", "model.width=4"]


def test_settings_beside_the_recipe_as_it_is(monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    """On a clock that each step moves, by 2 ms, of a wider model by 5 ms."""
    clock = Clock()

    def step(run: Run, *arguments: Any) -> None:
        train_step(run, *arguments)
        clock.move(0.005 if run.gradients.parameters[0].shape[0] == 6 else 0.002)

    monkeypatch.setattr(setting, "train_step", step)
    monkeypatch.setattr(setting, "now", lambda _: clock())
    monkeypatch.setattr(setting, "threads_per_rank", lambda *_: 1)
    settings = ["parallel.reduction=tree", "model.width=6"]
    assert bench_setting("digits", settings, SMALL, rounds=6, steps=2) == 0
    *_, as_it_is, tree, wide = capsys.readouterr().out.strip().splitlines()
    assert as_it_is == "| as it is | 2.00 |  |  |"
    assert tree == "| parallel.reduction=tree | 2.00 | 1.000 | 1.000 to 1.000 |"
    assert wide == "| model.width=6 | 5.00 | 2.500 | 2.500 to 2.500 |"
