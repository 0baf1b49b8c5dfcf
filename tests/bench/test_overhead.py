"""Promise: at most 20 us of host time per step over a hand-written loop; and a bench that can fail."""

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from tests.helpers.libraries import require
from trainer import loop
from trainer.bench import against, overhead
from trainer.cli import main
from trainer.keyed_rng import permuted


@pytest.mark.timed
@pytest.mark.parametrize(
    "target",
    [
        # What the claim says, for a quiet machine of today: docs/results/overhead.md.
        pytest.param("20", marks=pytest.mark.slow),
        # A net with wide meshes for any machine, busy or slow; tests/train/test_counts.py has the fine ones.
        "100",
    ],
)
def test_the_target_is_met(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Up to four tries: other work on the machine falls on one of the loops now and then."""
    codes: list[int] = []
    while 0 not in codes and len(codes) < 4:
        codes.append(main(["bench", "overhead", "--rounds", "20", "--steps", "300", "--target", target]))
    out = capsys.readouterr().out
    # Undecided each time is no proof of the contrary: the machine was too busy to say.
    assert 0 in codes or 1 not in codes, out
    assert re.search(r"trainer - by hand +-?\d+\.\d +95 % interval", out)


@pytest.mark.timed
def test_a_slower_loop_misses_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """200 us more per step, in the place where they would come from: the step itself."""
    original: Any = loop.train

    def slower(training: Any, *arguments: Any, **keywords: Any) -> None:
        advance = training.rates.advance

        def slow_advance(skipped: torch.Tensor | None = None) -> None:
            end = time.perf_counter() + 200e-6
            while time.perf_counter() < end:
                pass
            advance(skipped)

        training.rates.advance = slow_advance
        original(training, *arguments, **keywords)

    monkeypatch.setattr(overhead, "train", slower)
    assert main(["bench", "overhead", "--rounds", "10", "--steps", "100"]) == 1
    assert "MISSED" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--steps", "0"]])
def test_nothing_measured_is_no_success(arguments: list[str]) -> None:
    assert main(["bench", "overhead", *arguments]) == 3


class Kept(overhead.TinyTask):
    """Every model that it makes starts alike and is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.models: list[nn.Module] = []

    def model(self) -> nn.Module:
        torch.manual_seed(3)
        self.models.append(super().model())
        return self.models[-1]


def test_both_loops_do_the_same_mathematics(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From the same weights, in the same order, over more than an epoch: the same weights."""
    steps, size = 700, len(overhead.TinyTask().x)
    task, recipe, epochs = Kept(), overhead.tiny_recipe(700), iter(range(5))

    def order(_: int) -> torch.Tensor:
        return torch.from_numpy(permuted(recipe.seed, np.full(size, next(epochs)), np.arange(size), size))

    monkeypatch.setattr(torch, "randperm", order)
    overhead.by_hand(task, recipe.optim, steps)
    epochs = iter(range(5))
    overhead.by_hand(task, recipe.optim, steps, lean=True)
    overhead.by_trainer(task, recipe, tmp_path)
    start = Kept().model()
    # After these three come others, on which the trainer tries what it wants to know.
    by_hand, lean, by_trainer = (next(model.parameters()) for model in task.models[:3])
    assert torch.allclose(by_hand, by_trainer, atol=1e-6)
    assert torch.allclose(lean, by_trainer, atol=1e-6)
    assert not torch.allclose(by_hand, next(start.parameters()), atol=1e-2)


@pytest.mark.parametrize("library", ["lightning", "fabric", "accelerate", "ignite"])
def test_a_library_does_the_same_mathematics(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    """From the same weights, in the same order, over more than an epoch: the same weights and averages."""
    require(library)
    steps, size = 600, len(overhead.TinyTask().x)
    task, recipe = Kept(), overhead.tiny_recipe(600)
    averages: dict[int, torch.Tensor] = {}
    original: Any = torch._foreach_lerp_

    def order(_: int) -> torch.Tensor:
        return torch.from_numpy(permuted(recipe.seed, np.full(size, next(epochs)), np.arange(size), size))

    def lerp(average: list[torch.Tensor], *others: Any) -> None:
        averages[id(average)] = average[0]
        original(average, *others)

    monkeypatch.setattr(torch, "randperm", order)
    monkeypatch.setattr(torch, "_foreach_lerp_", lerp)
    epochs = iter(range(5))
    overhead.by_hand(task, recipe.optim, steps)
    epochs = iter(range(5))
    tiny = overhead.TinySteps(task, recipe.optim, steps)
    seconds = against.chosen(library, "train_tiny")[library](tiny)
    assert seconds > 0
    by_hand, by_library = (next(model.parameters()) for model in task.models)
    assert torch.allclose(by_hand, by_library, atol=1e-6)
    assert not torch.allclose(by_hand, next(Kept().model().parameters()), atol=1e-2)
    hand_average, library_average = averages.values()
    assert torch.allclose(hand_average, library_average, atol=1e-6)
    assert not torch.allclose(hand_average, by_hand, atol=1e-5)


def test_a_library_gets_its_row(capsys: pytest.CaptureFixture[str]) -> None:
    require("ignite")
    code = main(
        ["bench", "overhead", "--rounds", "2", "--steps", "20", "--target", "1e6", "--against", "ignite"]
    )
    assert code == 0
    out = capsys.readouterr().out
    assert re.search(r"^\| ignite \d\S+ \| \d+\.\d \| -?\d+\.\d \| -?\d+\.\d to -?\d+\.\d \|$", out, re.M)
    assert re.search(r"trainer - by hand +-?\d+\.\d +95 % interval", out)


def test_an_unknown_library_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "overhead", "--against", "timm"]) == 2
    assert "it knows lightning, fabric, accelerate, ignite" in capsys.readouterr().err


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=60))
def test_the_interval_encloses_the_median(values: list[float]) -> None:
    middle, low, high = overhead.median_interval(values)
    assert low <= middle <= high


def test_the_interval_holds_the_true_median_in_95_percent() -> None:
    random = np.random.default_rng(0)
    hits = 0
    for _ in range(2000):
        _, low, high = overhead.median_interval(random.standard_normal(30).tolist())
        hits += low <= 0 <= high
    assert 0.93 <= hits / 2000 <= 0.99
