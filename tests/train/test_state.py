"""Promise: what a run carries from step to step is saved and restored to the bit."""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest
import torch

from tests.helpers.steps import assert_same_bits, go, saved
from tests.helpers.toys import build_alone, make_recipe
from trainer.observe.log import Logged
from trainer.train.components.task import make_task
from trainer.train.state import Run, TrainState, load_state, load_tensors, numbers_of
from trainer.train.step import take_metrics, train_step

pytestmark = pytest.mark.compat

RUN: dict[str, Any] = {
    "max_steps": 8,
    "data": {"global_batch_size": 32, "micro_batch_size": 16, "augment": "affine"},
    "model": {"width": 4, "dropout": 0.3},
    "optim": {"lr": 0.01, "max_grad_norm": 1.0},
    "ema": {"decay": 0.7},  # low enough that steps between movements count beside the ramp
}


def started(**sections: Any) -> Run:
    values = {
        name: section if not isinstance(section, dict) else {**RUN.get(name, {}), **section}
        for name, section in sections.items()
    }
    recipe = make_recipe(**{**RUN, **values})
    return build_alone(recipe, make_task(recipe))


@pytest.mark.parametrize(
    "sections",
    [
        {"ema": {"every": 3}},
        {"optim": {"name": "sgd", "schedule": "one-cycle"}, "model": {"channels_last": True}},
        {"optim": {"name": "muon", "layer_decay": 0.7}, "regularization": {"mixup": 0.2, "cutmix": 1.0}},
        {"precision": {"mode": "fp16", "initial_scale": 2.0**20, "growth_interval": 3}},
        {"memory": {"checkpointing": "blocks"}, "regularization": {"stochastic_depth": 0.3}},
        {"data": {"micro_batch_size": 4, "resident": False, "last_batch": "weighted"}},
    ],
    ids=["adamw and average", "sgd", "muon and mixing", "fp16", "checkpointing", "accumulation"],
)
def test_a_run_that_was_cut_ends_with_the_same_bits(sections: dict[str, Any]) -> None:
    """After its first step, and in its midst."""
    whole = started(**sections)
    losses = go(whole, range(8))
    for cut in (1, 5):
        first, second = started(**sections), started(**sections)
        before = go(first, range(cut))
        load_tensors(second.state, cut, saved(first))
        assert before + go(second, range(cut, 8)) == losses
        assert saved(second).keys() == {"model", "optimizer", "ema"}
        assert_same_bits(saved(second), saved(whole))


def held(thing: Any, above: tuple[Any, ...] = ()) -> Any:
    """All tensors, numbers and texts that an object holds, in lists that can be compared."""
    if isinstance(thing, torch.Tensor):
        return thing.tolist()
    if isinstance(thing, int | float | str | None) or any(thing is one for one in above):
        return repr(thing) if isinstance(thing, int | float | str | None) else "itself"
    if isinstance(thing, torch.nn.Module | torch.optim.Optimizer):
        thing = thing.state_dict()
    if isinstance(thing, Mapping):
        return [(str(name), held(one, (*above, thing))) for name, one in thing.items()]
    if isinstance(thing, list | tuple | set):
        return [held(one, (*above, thing)) for one in thing]
    return [] if callable(thing) else held(getattr(thing, "__dict__", {}), (*above, thing))


def test_each_field_comes_back_or_is_made_by_each_step() -> None:
    """So nothing that a row reports depends on where the process began."""
    sections = {"precision": {"mode": "fp16"}, "anomaly": {"nonfinite": "skip", "spike": "stop"}}
    run, other = started(**sections), started(**sections)
    names = [each.name for each in fields(TrainState) if getattr(run.state, each.name) is not None]
    fresh = {name: held(getattr(other.state, name)) for name in names}
    go(run, range(3))
    state = run.state
    assert state.left_out is not None
    state.left_out.fill_(1)
    state.step, state.no_better, state.history, state.metrics = 3, 1, [1.0, 2.0], {"loss": 0.25}
    state.best, state.logged = (0.5, 2), Logged(2, 1.5, 24, [{"time/wall": 1.0}])
    untried = [name for name in names if held(getattr(state, name)) == fresh[name]]
    assert not untried, "give it another value than a run begins with"
    numbers = numbers_of(state, run.reduction.gather_losses(state.loss).tolist())
    load_state(other, 3, saved(run), json.loads(json.dumps(numbers)))
    for one in (run, other):
        train_step(one, one.loader(one.share.batches(3)), 3)
    for name in names:
        assert held(getattr(other.state, name)) == held(getattr(state, name)), name
    assert [*map(float, take_metrics(other).values())] == [*map(float, take_metrics(run).values())]
