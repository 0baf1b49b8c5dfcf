"""A few steps of the digits on a rank of a world: what the tests of several ranks compare."""

from contextlib import nullcontext
from typing import Any

import torch

from tests.helpers.steps import go
from tests.helpers.toys import make_recipe
from trainer.distributed.parallel import World
from trainer.train.components.run import build
from trainer.train.components.task import make_task
from trainer.train.evaluate import evaluate

DIGITS: dict[str, Any] = {
    "epochs": 1,
    "max_steps": 6,
    "data": {"global_batch_size": 64, "micro_batch_size": 16, "eval_batch_size": 50, "augment": "affine"},
    "model": {"width": 8},
    "optim": {"lr": 0.01, "max_grad_norm": 1.0},
    "ema": {"decay": 0.9},
}


def train_digits(
    world: World, recipe_values: dict[str, Any], workers: int
) -> tuple[list[float], dict[str, float], dict[str, torch.Tensor]]:
    """Losses of each step, the evaluation, and the weights, on one rank."""
    recipe = make_recipe(**recipe_values)
    task = make_task(recipe)
    run = build(recipe, task, world, workers)
    losses = go(run, range(run.plan.steps))
    share = run.evaluation_share
    with nullcontext() if run.state.average is None else run.state.average.in_place():
        metrics = evaluate(task, run.state.model, run.evaluation_loader, share, world, recipe.precision)
    run.loader.close()
    return losses, metrics, {name: t.clone() for name, t in run.state.model.state_dict().items()}
