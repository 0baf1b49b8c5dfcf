"""Promise: the bench times the trainer's loop beside the same mathematics by hand, and judges."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import overhead
from benchmarks.__main__ import main
from trainer.rng import permuted


def test_a_target_within_the_interval_is_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, none = np.array([10.0, 30.0] * 5), np.zeros(10)
    times = overhead.HostTimes(20, 50, none, none, ours, {})
    monkeypatch.setattr(overhead, "measure_overhead", lambda *_: times)
    assert main(["overhead"]) == 3


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
