"""Promise: the bench times the trainer's loop beside the same mathematics by hand, and judges."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import overhead
from benchmarks.__main__ import main
from tests.helpers.clock import Clock
from trainer.optim.optimizers import LRScheduler
from trainer.rng import permuted

Capsys = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("slower", "told", "code", "verdict"), [(1, "15.3", 0, "met"), (2, "30.5", 1, "MISSED")]
)
def test_a_slower_loop_misses_the_target(
    monkeypatch: pytest.MonkeyPatch, capsys: Capsys, slower: int, told: str, code: int, verdict: str
) -> None:
    """On a clock that the loops move: by 122 us each step, in the trainer's alone by 15 or 31 us more.

    What it really takes is measured by `make bench BENCH=overhead`; tests/train/test_counts.py counts it.
    """
    clock, advance = Clock(), LRScheduler.advance
    cross_entropy: Callable[..., torch.Tensor] = nn.functional.cross_entropy

    def step(*arguments: Any, **keywords: Any) -> torch.Tensor:
        clock.move(2**-13)
        return cross_entropy(*arguments, **keywords)

    def update(self: LRScheduler, *arguments: Any) -> None:
        clock.move(slower * 2**-16)
        advance(self, *arguments)

    monkeypatch.setattr(overhead, "time", clock.time)
    monkeypatch.setattr(nn.functional, "cross_entropy", step)
    monkeypatch.setattr(LRScheduler, "advance", update)
    assert main(["overhead", "--rounds", "1", "--steps", "20"]) == code
    out = capsys.readouterr().out
    assert f"trainer - by hand           {told}   95 % interval {told} to {told}\n" in out
    assert f"over by hand: {verdict}" in out


def test_a_target_within_the_interval_is_undecided(monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    ours, none = np.array([10.0, 30.0] * 5), np.zeros(10)
    times = overhead.HostTimes(20, 50, none, none, ours, {})
    monkeypatch.setattr(overhead, "measure_overhead", lambda *_: times)
    assert main(["overhead"]) == 3
    assert "over by hand: undecided: more --rounds" in capsys.readouterr().out


class Kept(overhead.TinyTask):
    """Every model that it makes starts alike and is kept."""

    models: tuple[nn.Module, ...] = ()

    def model(self) -> nn.Module:
        torch.manual_seed(3)
        self.models += (super().model(),)
        return self.models[-1]


def test_both_loops_do_the_same_mathematics(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From the same weights, in the same order, over more than an epoch: the same weights."""
    steps, size = 520, len(overhead.TinyTask().x)
    task, recipe, epochs = Kept(), overhead.tiny_recipe(520), iter(range(5))

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
