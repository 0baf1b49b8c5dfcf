"""Promise: a step in which no parameter gets a gradient changes nothing, as in torch."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.refusals import named
from tests.helpers.steps import ALONE
from tests.helpers.toys import TokenTask, make_recipe
from tests.helpers.world import Ranks
from trainer.distributed.parallel import World
from trainer.models.precision import scale_of
from trainer.train import outputs
from trainer.train.components.run import build
from trainer.train.step import take_metrics, train_step

pytestmark = pytest.mark.compat


class Task(TokenTask):
    """Gives a loss without gradient in the steps that are told."""

    without = (False, True, True, False)

    def __init__(self, ragged: bool, losses: bool = False) -> None:
        super().__init__(32, ragged=ragged, dtype=torch.float32, blocks=1)
        self.calls, self.per_step = 0, 2
        self.losses = ("a", "b") if losses else ()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if not model.training:  # what is tried before the training
            return super().loss(model, batch)
        step, self.calls = self.calls // self.per_step, self.calls + 1
        if self.without[step % 4]:
            return torch.zeros((), requires_grad=True)
        return super().loss(model, batch)

    def parts(self, model: nn.Module, batch: Any) -> tuple[list[torch.Tensor], None]:
        return [self.loss(model, batch), *[torch.zeros(())] * bool(self.losses)], None


def trained(world: World, ragged: bool, losses: bool, sections: dict[str, Any]) -> list[dict[str, Any]]:
    """After each step the weights, what was told, and the optimizer's counts."""
    optim = {"lr": 0.1, "weight_decay": 0.5, **sections.get("optim", {})}
    recipe = make_recipe(epochs=2, **{**sections, "optim": optim, "data": SIZES})
    task = Task(ragged, losses)
    run = build(recipe, task, world, 0)
    task.calls, task.per_step = 0, 2 // world.size
    batches, seen = run.loader(run.share.batches()), []
    for step in range(4):
        train_step(run, batches, step)
        told = {name: float(value) for name, value in take_metrics(run).items()}
        weights = [p.detach().clone() for p in run.gradients.parameters]
        counts = [float(state["step"]) for state in run.state.optimizer.state.values() if "step" in state]
        scale = None if run.state.scaler is None else float(scale_of(run.state.scaler))
        seen.append({"weights": weights, "told": told, "counts": counts, "scaler": scale})
    run.close()
    return seen


SIZES = {"global_batch_size": 8, "micro_batch_size": 4}
OPTIONS: dict[str, dict[str, Any]] = {
    "clipped": {"optim": {"max_grad_norm": 1.0}},
    "muon": {"optim": {"name": "muon"}},
    "fp16": {"precision": {"mode": "fp16"}, "optim": {"name": "sgd"}, "ema": {"decay": 0.9}},
    "skips": {"anomaly": {"nonfinite": "skip"}, "optim": {"max_grad_norm": 1.0}},
    "tree": {"parallel": {"threads": 1, "reduction": "tree"}},
}


def assert_still(seen: list[dict[str, Any]], clips: bool) -> None:
    first, second, third, last = seen
    for one in (second, third):
        assert all(map(torch.equal, one["weights"], first["weights"])), "no gradient, and weights moved"
        assert (one["counts"], one["scaler"]) == (first["counts"], first["scaler"])
        assert one["told"]["loss"] == 0 and one["told"].get("grad_norm", 0.0) == 0
    assert not all(map(torch.equal, last["weights"], first["weights"]))
    assert math.isfinite(last["told"]["loss"])
    assert ("grad_norm" in last["told"]) >= clips


@pytest.mark.parametrize("options", OPTIONS)
def test_nothing_moves(options: str) -> None:
    for ragged, losses in ((False, True), (True, False)):
        seen = trained(ALONE, ragged, losses, OPTIONS[options])
        assert_still(seen, clips=options in ("clipped", "skips"))


@pytest.mark.parametrize("parallel", [{"reduction": "tree"}, {"find_unused_parameters": True}])
def test_two_ranks_do_as_one(ranks: Ranks, parallel: dict[str, Any]) -> None:
    sections = {**OPTIONS["fp16"], "parallel": {"threads": 1, **parallel}}
    for seen in ranks.run(2, trained, True, False, sections):
        assert_still(seen, clips=False)


def test_a_gradient_of_zero_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    """As torch 2.11 computed it of a compiled function that changed what it returned in place."""
    watch = outputs._watch_for_no_gradient()
    row: Any = {"kind": "train", "loss": 2.0, "grad_norm": 0.0}
    watch({**row, "step": 5, "loss": 0.0})  # no token counted
    watch({**row, "step": 10, "grad_norm": 0.1})
    watch({"kind": "train", "step": 15, "loss": 2.0})  # not measured
    assert not capsys.readouterr().err
    for step in (20, 25):
        watch({**row, "step": step})
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and named(said, "20 0 2")
