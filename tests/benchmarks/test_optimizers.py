"""Promise: the bench of optimizers gives all the same budget, and selects and counts as documented."""

import importlib.util
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from benchmarks import optimizers
from benchmarks.optimizers import Job, Learnt, Setting, best_of, prepare, tune_and_learn, updates_to
from trainer.optim.muon import Muon
from trainer.optim.optimizers import LRScheduler

SETTING = Setting("transformer", 8, 10)


def test_the_best_rate_is_one_that_did_not_diverge() -> None:
    assert best_of((1.0, 2.0, 3.0), (math.nan, 0.5, math.inf)) == 2.0
    assert best_of((1.0, 2.0), (0.1, 0.5)) == 1.0


def test_updates_are_counted_to_the_first_evaluation_that_is_low_enough() -> None:
    losses = np.array([3.0, 2.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5])
    assert updates_to(1.0, losses, 200) == 60
    assert updates_to(0.5, losses, 200) == 200
    assert updates_to(0.1, losses, 200) is None


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon", "lamb"])
def test_all_start_from_the_same_weights_with_their_own_optimizer(name: str) -> None:
    if name == "lamb" and importlib.util.find_spec("timm") is None:
        pytest.skip("timm isn't installed")
    run = prepare(Job(SETTING, name, 0.01, 5))
    expected = prepare(Job(SETTING, "adamw", 0.01, 5))
    assert type(run.state.optimizer).__name__.lower() == name
    for ours, theirs in zip(run.gradients.parameters, expected.gradients.parameters, strict=True):
        assert torch.equal(ours, theirs)
    held = {id(p) for group in run.state.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in run.gradients.parameters}
    assert isinstance(run.state.lr, LRScheduler)
    assert all(group["lr"] is run.state.lr.current for group in run.state.optimizer.param_groups)


def test_muon_has_matrices_in_both_models() -> None:
    for model in ("resnet", "transformer"):
        optimizer = prepare(Job(Setting(model, 8, 10), "muon", 0.01, 0)).state.optimizer
        assert isinstance(optimizer, Muon)
        assert any(group["orthogonal"] for group in optimizer.param_groups)


def test_what_is_reported_comes_from_other_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    def learn(job: Job) -> optimizers.Figures:
        return np.full((10, 2), 9.0 + job.seed if job.seed else abs(job.rate - 0.3))

    monkeypatch.setattr(optimizers, "learn", learn)
    case = (SETTING, "sgd")
    with ThreadPoolExecutor(1) as pool:
        learnt: Learnt = tune_and_learn(pool, [case], {"sgd": (0.1, 0.3, 1.0)}, (1, 2))[case]
    assert learnt.rate == 0.3
    assert learnt.curves[:, -1, 0].tolist() == [10.0, 11.0]


def test_a_job_learns_the_same_again() -> None:
    job = Job(SETTING, "muon", 0.01, 0)
    figures = optimizers.learn(job)
    assert figures.shape == (10, 2)
    assert np.isfinite(figures).all()
    assert np.array_equal(figures, optimizers.learn(job))
