"""A few steps of a run in this process, and a packaged recipe on little data: what tests of tasks share."""

from collections.abc import Sequence
from typing import Any

import torch

from tests.helpers.toys import build_alone
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import override, read_recipe
from trainer.distributed.parallel import World
from trainer.train.components.run import build
from trainer.train.components.task import check_request, make_task
from trainer.train.evaluate import evaluate
from trainer.train.state import load_tensors, tensors_of
from trainer.train.step import train_step

ALONE = World(0, 1, 0, torch.device("cpu"), None)

# Settings of a detector's recipe on pictures of noise.
LITTLE = [f"data.{name}" for name in ("name=synthetic", "samples=8", "classes=5", "image_size=32")]
LITTLE += [f"data.{name}" for name in ("global_batch_size=2", "micro_batch_size=1", "eval_batch_size=1")]
LITTLE += ["precision.mode=fp32"]

State = dict[str, dict[str, torch.Tensor]]


def train_some(
    recipe: Recipe, task: Any, steps: range, state: State | None = None, world: World = ALONE
) -> tuple[State, list[float]]:
    """Trains some steps of a run, from a saved state; gives the state after them, and the losses."""
    run = build(recipe, task, world, 0)
    if state is not None:
        load_tensors(run.state, steps.start, state)
    run.replica.train()
    batches = run.loader(run.share.batches(steps.start))
    losses = []
    for step in steps:
        run.state.loss.zero_()
        train_step(run, batches, step)
        losses.append(float(run.state.loss))
    run.close()
    tensors = tensors_of(run.state).items()
    return {kind: {name: t.detach().clone() for name, t in part.items()} for kind, part in tensors}, losses


def assert_same_bits(one: State, other: State) -> None:
    for kind, part in one.items():
        assert part.keys() == other[kind].keys()
        for name, tensor in part.items():
            assert torch.equal(tensor, other[kind][name]), (kind, name)


def dry_run(name: str, settings: Sequence[str]) -> dict[str, float]:
    """One step and an evaluation of a packaged recipe, on the CPU with changed settings."""
    recipe = Recipe.model_validate(override(read_recipe(name), ["parallel.threads=1", *settings]))
    task = make_task(recipe)
    check_request(recipe, task, 1)
    run = build_alone(recipe, task)
    run.replica.train()
    train_step(run, run.loader(run.share.batches()), 0)
    assert bool(run.state.loss.isfinite()) and float(run.state.loss) > 0
    args = run.evaluation_loader, run.evaluation_share, ALONE, recipe.precision
    return evaluate(task, run.state.model, *args)
