"""Promise: a run begins with a table of its model, whose figures are right and cost no start-up time."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.toys import LENGTH, TokenTask, make_recipe
from trainer.models.parts import parts
from trainer.observe.flops import Count
from trainer.train.components.memory import ROWS, describe_model
from trainer.train.components.operations import count_operations

CPU = torch.device("cpu")
# Of a sample's linear layers, a multiply and an add each: forward, and the weights' gradients.
FIRST, BLOCK, LAST = 2 * LENGTH * 3 * 6, 2 * LENGTH * 6 * 6, 2 * LENGTH * 6 * 4


def counted(task: TokenTask) -> tuple[nn.Module, Count]:
    model = task.model()
    return model, count_operations(task, model, 4, CPU, parts(model, ROWS))


def test_the_flops_of_each_part_are_those_by_hand() -> None:
    """The first layer has no gradient of its input; residual blocks share theirs with their neighbors."""
    _, count = counted(TokenTask(16, ragged=False, blocks=2))
    assert count.by_part == {"0": 2 * FIRST, "2.0": 3 * BLOCK, "2.1": 3 * BLOCK, "3": 3 * LAST}
    assert sum(count.by_part.values()) == count.per_sample


@pytest.mark.parametrize(
    ("optim", "ema", "own", "copies"),
    [
        ({"name": "sgd", "momentum": 0}, {}, False, 2),
        ({"name": "adamw"}, {"decay": 0.9}, False, 5),
        ({"name": "adamw"}, {}, True, 2),  # the state of an optimizer that nobody knows isn't counted
    ],
)
def test_memory_is_what_the_first_step_holds(optim: Any, ema: Any, own: bool, copies: int) -> None:
    model, count = counted(TokenTask(16, ragged=False, dtype=torch.float32, blocks=1))
    recipe = make_recipe(data={"global_batch_size": 8, "micro_batch_size": 4}, optim=optim, ema=ema)
    told = describe_model(recipe, model, parts(model, ROWS), count, own_optimizer=own)
    numbers = sum(p.numel() for p in model.parameters())
    assert told["total"]["parameters"] == told["total"]["trainable"] == numbers
    assert told["total"]["bytes"] == copies * 4 * numbers
    assert told["total"]["flops"] == 8 * count.per_sample


def test_frozen_weights_have_no_gradients() -> None:
    model, count = counted(TokenTask(16, ragged=False, dtype=torch.float32))
    next(model.children()).requires_grad_(False)
    row = describe_model(make_recipe(), model, parts(model, ROWS), count)["rows"][0]
    assert (row["parameters"], row["trainable"], row["bytes"]) == (24, 0, 4 * 24)


def test_muon_keeps_one_moment_of_a_matrix() -> None:
    model, count = counted(TokenTask(16, ragged=False, dtype=torch.float32, blocks=1))
    recipe = make_recipe(optim={"name": "muon"})
    rows = describe_model(recipe, model, parts(model, ROWS), count)["rows"]
    block = next(row for row in rows if row["block"].startswith("2"))
    assert block["bytes"] == 4 * (36 * 3 + 6 * 4)


def test_where_nothing_can_be_counted_nothing_is_claimed() -> None:
    model = TokenTask(16).model()
    told = describe_model(make_recipe(), model, parts(model, ROWS), Count())
    assert {row["flops"] for row in (*told["rows"], told["total"])} == {None}
