"""Promise: the gradient of every step is that of its samples concatenated, whatever the cut."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from tests.helpers.refusals import refused
from tests.helpers.toys import TokenTask, make_recipe
from tests.helpers.world import Ranks
from trainer.distributed.parallel import World
from trainer.rng import permuted
from trainer.train.components.run import build
from trainer.train.step import train_step


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
    micro_batch_size = draw(st.integers(1, 3))
    micro_batches = draw(st.integers(1, 64))
    missing = draw(st.integers(0, micro_batch_size - 1))
    return Case(
        samples=micro_batches * micro_batch_size - missing,
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=draw(st.integers(1, 16)),
        world=draw(st.sampled_from((1, 2, 4))),
        last=draw(st.sampled_from(("cross", "drop", "weighted"))),
        epochs=draw(st.integers(1, 3)),
        ragged=draw(st.booleans()),
        resident=draw(st.booleans()),
    )


class Capture:
    """In the optimizer's place: keeps gradients, changes nothing."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.parameters = parameters
        self.gradients: list[torch.Tensor] = []

    def step(self) -> None:
        parts = [p.grad.flatten() for p in self.parameters if p.grad is not None]
        self.gradients.append(torch.cat(parts).clone())


def step_gradients(world: World, case: Case) -> tuple[list[torch.Tensor], torch.Tensor, int]:
    """What the trainer's own step computes, on one of the ranks."""
    data = {
        "global_batch_size": case.micro_batch_size * case.gradient_accumulation_steps * case.world,
        "micro_batch_size": case.micro_batch_size,
        "resident": case.resident,
        "last_batch": case.last,
    }
    recipe = make_recipe(epochs=case.epochs, data=data)
    run = build(recipe, TokenTask(case.samples, case.ragged), world, workers=0)
    capture: Any = Capture(run.gradients.parameters)
    run.state.optimizer = capture
    plan = run.plan
    batches = run.loader(run.share.batches())
    for step in range(plan.steps):
        train_step(run, batches, step)
    assert next(batches, None) is None
    return capture.gradients, run.state.loss, int(run.state.lr.updates)


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
    logits = model(task.arrays["x"][samples])
    label = task.arrays["y"][samples]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), label.flatten(), reduction="mean").backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def initial_model(task: TokenTask) -> torch.nn.Module:
    recipe = make_recipe(data={"global_batch_size": 1, "micro_batch_size": 1})
    return build(recipe, task, World(0, 1, 0, torch.device("cpu"), None), 0).state.model


@pytest.mark.compat
@given(case=cases())
def test_every_step_is_the_concatenated_batch(ranks: Ranks, case: Case) -> None:
    steps = expected_steps(case)
    if not steps:
        with pytest.raises(AssertionError, match="leaves no step"):
            ranks.run(case.world, step_gradients, case)
        return
    answers = ranks.run(case.world, step_gradients, case)
    task = TokenTask(case.samples, case.ragged)
    model = initial_model(task)
    for gradients, _, updates in answers:
        assert len(gradients) == updates == len(steps)
    for number, samples in enumerate(steps):
        wanted = expected_gradient(task, model, samples)
        for gradients, _, _ in answers:
            error = (gradients[number] - wanted).norm() / wanted.norm()
            assert error <= 1e-12, f"step {number}: relative error {error}"


@pytest.mark.compat
@pytest.mark.parametrize("ragged", [False, True])
def test_the_logged_loss_is_the_mean_over_each_step(ranks: Ranks, ragged: bool) -> None:
    case = Case(20, 2, 2, 2, "weighted", 1, ragged, True)
    answers = ranks.run(2, step_gradients, case)
    task = TokenTask(20, ragged)
    model = initial_model(task)
    wanted = 0.0
    for samples in expected_steps(case):
        logits = model(task.arrays["x"][samples]).flatten(0, 1)
        wanted += torch.nn.functional.cross_entropy(logits, task.arrays["y"][samples].flatten()).item()
    assert float(sum(loss for _, loss, _ in answers)) == pytest.approx(wanted, rel=1e-12)


def test_micro_batches_must_divide_among_the_ranks() -> None:
    recipe = make_recipe(data={"global_batch_size": 6, "micro_batch_size": 2})
    with refused("data.global_batch_size"):
        build(recipe, TokenTask(20), World(0, 2, 0, torch.device("cpu"), None), 0)
