"""Promise: worlds of 1, 2 and 4 real processes train the same, and every rank ends with the same weights."""

from typing import Any

import pytest
import torch

from tests.helpers import digits_steps
from tests.helpers.digits_steps import train_digits
from tests.helpers.refusals import named
from tests.helpers.steps import ALONE, assert_same_bits
from tests.helpers.toys import make_recipe
from tests.helpers.world import SIZES, Ranks
from trainer.distributed.parallel import World, check_agreement
from trainer.errors import BadInputError
from trainer.train.components.run import build
from trainer.train.components.task import make_task
from trainer.train.evaluate import evaluate_run

DIGITS = digits_steps.DIGITS


@pytest.mark.parametrize(("norm", "resident"), [("batch", True), ("group", False)])
def test_worlds_agree(ranks: Ranks, norm: str, resident: bool) -> None:
    values = DIGITS | {"model": {"width": 8, "norm": norm}, "data": DIGITS["data"] | {"resident": resident}}
    by_size = {size: ranks.run(size, train_digits, values, 0) for size in SIZES}
    alone_losses, alone_figures, alone_weights = by_size[1][0]
    for answers in by_size.values():
        losses = torch.tensor([losses for losses, _, _ in answers], dtype=torch.float64).sum(0)
        assert torch.allclose(losses, torch.tensor(alone_losses, dtype=torch.float64), rtol=1e-4)
        for _, metrics, weights in answers:
            assert metrics == answers[0][1]
            assert metrics["accuracy"] == pytest.approx(alone_figures["accuracy"], abs=0.01)
            assert_same_bits(weights, answers[0][2])
            torch.testing.assert_close(weights, alone_weights, rtol=1e-2, atol=2e-3)


def evaluate_untrained(world: World) -> dict[str, float]:
    recipe = make_recipe(**DIGITS | {"data": DIGITS["data"] | {"eval_batch_size": 7, "resident": False}})
    return evaluate_run(build(recipe, make_task(recipe), world, workers=0))[0]


def losses_of(ranks: Ranks, size: int, **sections: Any) -> torch.Tensor:
    """Of each step, summed over the ranks."""
    answers = ranks.run(size, train_digits, DIGITS | sections, 0)
    return torch.tensor([losses for losses, _, _ in answers], dtype=torch.float64).sum(0)


@pytest.mark.parametrize("size", [2, 4])
def test_no_factor_of_the_world_size_is_in_the_gradient(ranks: Ranks, size: int) -> None:
    """AdamW and clipping would hide one; plain SGD follows it at once."""
    plain = {"optim": {"name": "sgd", "lr": 0.05}, "model": {"width": 8, "norm": "group"}}
    assert torch.allclose(losses_of(ranks, size, **plain), losses_of(ranks, 1, **plain), rtol=1e-4)


def test_worlds_agree_with_every_part_of_the_recipe(ranks: Ranks) -> None:
    values = DIGITS | {
        "precision": {"mode": "fp16"},
        "model": {"width": 8, "dropout": 0.3, "channels_last": True},
        "memory": {"checkpointing": "blocks"},
    }
    alone = torch.tensor(ranks.run(1, train_digits, values, 0)[0][0])
    answers = ranks.run(2, train_digits, values, 0)
    together = torch.tensor([losses for losses, _, _ in answers]).sum(0)
    assert torch.allclose(together, alone, rtol=2e-2)
    assert_same_bits(answers[1][2], answers[0][2])


def disagree(world: World) -> str:
    try:
        check_agreement(f"data of {world.rank // 2}", world)
    except BadInputError as error:
        return str(error)
    return ""


def test_ranks_with_different_data_are_told(ranks: Ranks) -> None:
    assert ranks.run(2, disagree) == ["", ""]
    answers = ranks.run(4, disagree)
    assert named(answers[0], "rank 0 rank 2") and named(answers[2], "rank 2 rank 0")


def test_evaluation_is_the_same_to_the_last_bit_in_every_world(ranks: Ranks) -> None:
    answers = [answer for size in SIZES for answer in ranks.run(size, evaluate_untrained)]
    assert all(answer == answers[0] for answer in answers)
    # Counted once each: accuracy over 360 images, computed without the trainer.
    recipe = make_recipe(**DIGITS)
    task = make_task(recipe)
    run = build(recipe, task, ALONE, 0)
    images: Any = task.evaluation_data.arrays
    pixels = (torch.from_numpy(images["image"]).permute(0, 3, 1, 2).float() / 255 - 0.287) / 0.354
    with torch.inference_mode():
        logits = run.state.model.eval()(pixels)
    label = torch.from_numpy(images["label"])
    assert answers[0]["accuracy"] == float((logits.argmax(1) == label).sum()) / 360
    loss = torch.nn.functional.cross_entropy(logits, label)
    assert answers[0]["loss"] == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.parametrize("size", [2, 4])
def test_dropout_is_keyed_by_step_and_micro_batch_not_by_rank(ranks: Ranks, size: int) -> None:
    """Losses of a model that is all dropout tell the random numbers of each micro-batch."""
    dropped = {"model": {"width": 8, "dropout": 0.9}, "optim": {"lr": 1e-12}}
    alone = losses_of(ranks, 1, **dropped)
    assert torch.allclose(losses_of(ranks, size, **dropped), alone, rtol=1e-5)
    assert len({*alone.tolist()}) == len(alone)
