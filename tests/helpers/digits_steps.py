"""A few steps of the digits on a rank of a world: what the tests of several ranks compare."""

from contextlib import nullcontext
from typing import Any

import torch

from tests.helpers.toys import make_recipe
from trainer.distributed.parallel import World
from trainer.train.evaluate import evaluate
from trainer.train.run import assemble, make_task
from trainer.train.step import train_step

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
    parts = assemble(recipe, task, world, workers)
    training = parts.training
    batches = parts.loader(training.share.batches())
    losses = []
    for step in range(training.share.plan.steps):
        before = training.loss.clone()
        train_step(training, batches, step)
        losses.append(float(training.loss - before))
    share = parts.evaluation_share
    with nullcontext() if training.average is None else training.average.in_place():
        metrics = evaluate(task, training.model, parts.evaluation_loader, share, world, recipe.precision)
    parts.loader.close()
    return losses, metrics, {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
