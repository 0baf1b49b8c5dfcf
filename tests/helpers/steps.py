"""A few steps of a run in this process, and a packaged recipe on little data: what tests of tasks share."""

from collections.abc import Sequence
from typing import Any

import torch

from tests.helpers.toys import build_alone
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import override, read_recipe
from trainer.distributed.parallel import World
from trainer.distributed.sharding import weights
from trainer.train.components.run import build
from trainer.train.components.task import check_request, make_task
from trainer.train.evaluate import evaluate
from trainer.train.state import Run, load_tensors, tensors_of
from trainer.train.step import train_step

ALONE = World(0, 1, 0, torch.device("cpu"), None)

# Settings of a detector's recipe on pictures of noise.
LITTLE = ["data.name=synthetic", "data.samples=8", "data.classes=5", "data.image_size=32"]
LITTLE += ["data.global_batch_size=2", "data.micro_batch_size=1", "data.eval_batch_size=1"]
LITTLE += ["precision.mode=fp32"]

State = dict[str, dict[str, torch.Tensor]]


def go(run: Run, steps: range) -> list[float]:
    """Trains some steps of a run; gives the loss of each."""
    batches, losses = run.loader(run.share.batches(steps.start)), []
    for step in steps:
        run.state.loss.zero_()
        train_step(run, batches, step)
        losses.append(float(run.state.loss))
    assert steps.stop < run.plan.steps or next(batches, None) is None
    return losses


def saved(run: Run) -> State:
    """A copy of its tensors, as a checkpoint holds them."""
    form = torch.contiguous_format
    tensors = tensors_of(run.state).items()
    return {
        kind: {n: t.detach().clone(memory_format=form) for n, t in part.items()} for kind, part in tensors
    }


def train_some(
    recipe: Recipe, task: Any, steps: range, state: State | None = None, world: World = ALONE
) -> tuple[State, list[float]]:
    """Trains some steps of a run, from a saved state; gives the state after them, and the losses."""
    run = build(recipe, task, world, 0)
    if state is not None:
        load_tensors(run.state, steps.start, state)
    losses = go(run, steps)
    run.close()
    return saved(run), losses


class Gathered:
    """In the optimizer's place: keeps the whole gradients on the first rank, changes nothing."""

    def __init__(self, run: Run) -> None:
        self.run, self.gradients = run, list[dict[str, torch.Tensor]]()

    def step(self) -> None:
        model, rows, whole = self.run.state.model, self.run.state.rows, {}
        for name, own in weights(model).items():
            one = own.grad
            if one is not None and rows is not None:
                one = rows.gather(one, model.get_parameter(name).shape)
            if one is not None:
                whole[name] = one.clone()
        self.gradients.append(whole)


def gradients_of(run: Run, steps: range = range(1)) -> tuple[list[dict[str, torch.Tensor]], list[float]]:
    """The whole gradients of each step, by name, without any update; and the losses."""
    kept: Any = Gathered(run)
    run.state.optimizer = kept
    losses = go(run, steps)
    return kept.gradients, losses


def flat(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([one.flatten() for one in gradients.values()])


def assert_same_bits(found: Any, wanted: Any) -> None:
    """Of tensors, or of lists and dicts of them, which have the same keys."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def dry_run(name: str, settings: Sequence[str]) -> dict[str, float]:
    """One step and an evaluation of a packaged recipe, on the CPU with changed settings."""
    recipe = Recipe.model_validate(override(read_recipe(name), ["parallel.threads=1", *settings]))
    task = make_task(recipe)
    check_request(recipe, task, 1)
    run = build_alone(recipe, task)
    (loss,) = go(run, range(1))
    assert 0 < loss < float("inf")
    args = run.evaluation_loader, run.evaluation_share, ALONE, recipe.precision
    return evaluate(task, run.state.model, *args)
