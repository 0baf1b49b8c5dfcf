"""Promise: the gradient of every step is that of its samples concatenated, whatever the cut."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.nn import functional as F

from tests.helpers.refusals import refused
from tests.helpers.steps import flat, gradients_of
from tests.helpers.toys import TokenTask, build_alone, make_recipe
from tests.helpers.world import Ranks
from trainer.distributed.parallel import World
from trainer.rng import permuted
from trainer.train.components.run import build


class Case(NamedTuple):
    samples: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    world: int
    last: str
    epochs: int
    ragged: bool
    resident: bool


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = draw(st.integers(1, 3))
    samples = draw(st.integers(1, 64)) * size - draw(st.integers(0, size - 1))
    accumulated, world = draw(st.integers(1, 16)), draw(st.sampled_from((1, 2, 4)))
    last = draw(st.sampled_from(("cross", "drop", "weighted")))
    more = draw(st.tuples(st.integers(1, 3), st.booleans(), st.booleans()))
    return Case(samples, size, accumulated, world, last, *more)


class Steps(NamedTuple):
    """Of a rank; gradients that are sharded the first rank has alone."""

    gradients: list[torch.Tensor]
    losses: list[float]
    norm: float
    updates: int


def step_gradients(
    world: World, case: Case, make: Callable[..., Any] = TokenTask, parallel: Any = None, blocks: int = 0
) -> Steps:
    """What the trainer's own step computes, on one of the ranks."""
    data = {
        "global_batch_size": case.micro_batch_size * case.gradient_accumulation_steps * case.world,
        "micro_batch_size": case.micro_batch_size,
        "resident": case.resident,
        "last_batch": case.last,
    }
    recipe = make_recipe(epochs=case.epochs, data=data, parallel={"threads": 1, **(parallel or {})})
    run = build(recipe, make(case.samples, case.ragged, blocks=blocks), world, workers=0)
    assert (run.state.rows is not None) == (parallel is not None and world.size > 1)
    found, losses = gradients_of(run, range(run.plan.steps))
    return Steps(
        [flat(one) for one in found if one], losses, float(run.state.norm), int(run.state.lr.updates)
    )


def expected_steps(case: Case) -> list[list[int]]:
    """The samples of each step, by cutting lists: shares nothing with the plan but the order."""
    size = case.micro_batch_size * case.gradient_accumulation_steps * case.world
    orders = [
        permuted(0, np.full(case.samples, epoch), np.arange(case.samples), case.samples).tolist()
        for epoch in range(case.epochs + size // case.samples + 1)
    ]
    if case.last == "cross":
        stream = [sample for order in orders for sample in order]
        steps = -(-case.samples * case.epochs // size)
        return [stream[number * size : (number + 1) * size] for number in range(steps)]
    cut = [order[at : at + size] for order in orders[: case.epochs] for at in range(0, case.samples, size)]
    return [step for step in cut if case.last == "weighted" or len(step) == size]


def expected_gradient(task: TokenTask, model: torch.nn.Module, samples: list[int]) -> torch.Tensor:
    """Mean over all valid tokens of all samples at once."""
    model.zero_grad()
    logits = model(task.arrays["x"][samples]).flatten(0, 1)
    F.cross_entropy(logits, task.arrays["y"][samples].flatten()).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def initial_model(task: TokenTask) -> torch.nn.Module:
    return build_alone(make_recipe(data={"global_batch_size": 1, "micro_batch_size": 1}), task).state.model


def check_gradients(task: TokenTask, case: Case, answers: Sequence[Steps]) -> None:
    """Compares those of each answer with those of the concatenated batches."""
    model, steps = initial_model(task), expected_steps(case)
    for answer in answers:
        assert len(answer.gradients) == answer.updates == len(steps) > 0
    for number, samples in enumerate(steps):
        wanted = expected_gradient(task, model, samples)
        for gradients, *_ in answers:
            error = (gradients[number] - wanted).norm() / wanted.norm()
            assert error <= 1e-12, f"step {number}: relative error {error}"


@pytest.mark.compat
@given(case=cases())
def test_every_step_is_the_concatenated_batch(ranks: Ranks, case: Case) -> None:
    if expected_steps(case):
        answers = ranks.run(case.world, step_gradients, case)
        check_gradients(TokenTask(case.samples, case.ragged), case, answers)
    else:
        with pytest.raises(AssertionError, match="leaves no step"):
            ranks.run(case.world, step_gradients, case)


@pytest.mark.compat
@pytest.mark.parametrize("ragged", [False, True])
def test_the_logged_loss_is_the_mean_over_each_step(ranks: Ranks, ragged: bool) -> None:
    case = Case(20, 2, 2, 2, "weighted", 1, ragged, True)
    task = TokenTask(20, ragged)
    model = initial_model(task)
    answers = ranks.run(2, step_gradients, case)
    wanted = []
    for samples in expected_steps(case):
        logits = model(task.arrays["x"][samples]).flatten(0, 1)
        wanted.append(F.cross_entropy(logits, task.arrays["y"][samples].flatten()).item())
    assert [*map(sum, zip(*(a.losses for a in answers), strict=True))] == pytest.approx(wanted, rel=1e-12)


def test_micro_batches_must_divide_among_the_ranks() -> None:
    recipe = make_recipe(data={"global_batch_size": 6, "micro_batch_size": 2})
    with refused("data.global_batch_size"):
        build(recipe, TokenTask(20), World(0, 2, 0, torch.device("cpu"), None), 0)
