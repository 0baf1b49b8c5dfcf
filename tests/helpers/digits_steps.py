"""A few steps of the digits on a rank of a world: what the tests of several ranks compare."""

from contextlib import nullcontext
from typing import Any

import torch

from tests.helpers.toys import make_recipe
from trainer.distributed.parallel import World
from trainer.train.components.run import build
from trainer.train.components.task import make_task
from trainer.train.evaluate import evaluate
from trainer.train.step import train_step

_DATA = {"global_batch_size": 64, "micro_batch_size": 16, "eval_batch_size": 50, "augment": "affine"}
DIGITS: dict[str, Any] = {"epochs": 1, "max_steps": 6, "data": _DATA, "model": {"width": 8}}
DIGITS |= {"optim": {"lr": 0.01, "max_grad_norm": 1.0}, "ema": {"decay": 0.9}}


def train_digits(
    world: World, recipe_values: dict[str, Any], workers: int
) -> tuple[list[float], dict[str, float], dict[str, torch.Tensor]]:
    """Losses of each step, the evaluation, and the weights, on one rank."""
    recipe = make_recipe(**recipe_values)
    task = make_task(recipe)
    run = build(recipe, task, world, workers)
    batches = run.loader(run.share.batches())
    losses = []
    for step in range(run.plan.steps):
        before = run.state.loss.clone()
        train_step(run, batches, step)
        losses.append(float(run.state.loss - before))
    share = run.evaluation_share
    with nullcontext() if run.state.average is None else run.state.average.in_place():
        metrics = evaluate(task, run.state.model, run.evaluation_loader, share, world, recipe.precision)
    run.loader.close()
    weights = {name: tensor.clone() for name, tensor in run.state.model.state_dict().items()}
    return losses, metrics, weights
