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


def counted(**task: Any) -> tuple[nn.Module, Count]:
    own = TokenTask(16, ragged=False, dtype=torch.float32, **task)
    model = own.model()
    return model, count_operations(own, model, 4, CPU, parts(model, ROWS))


def told(model: nn.Module, count: Count, own: bool = False, **sections: Any) -> Any:
    return describe_model(make_recipe(**sections), model, parts(model, ROWS), count, own_optimizer=own)


def test_the_flops_of_each_part_are_those_by_hand() -> None:
    """The first layer has no gradient of its input; residual blocks share theirs with their neighbors."""
    _, count = counted(blocks=2)
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
    model, count = counted(blocks=1)
    sizes = {"global_batch_size": 8, "micro_batch_size": 4}
    total = told(model, count, own, data=sizes, optim=optim, ema=ema)["total"]
    numbers = sum(p.numel() for p in model.parameters())
    assert total["parameters"] == total["trainable"] == numbers
    assert (total["bytes"], total["flops"]) == (copies * 4 * numbers, 8 * count.per_sample)


def test_frozen_weights_have_no_gradients() -> None:
    model, count = counted()
    next(model.children()).requires_grad_(False)
    row = told(model, count)["rows"][0]
    assert (row["parameters"], row["trainable"], row["bytes"]) == (24, 0, 4 * 24)


def test_muon_keeps_one_moment_of_a_matrix() -> None:
    rows = told(*counted(blocks=1), optim={"name": "muon"})["rows"]
    block = next(row for row in rows if row["block"].startswith("2"))
    assert block["bytes"] == 4 * (36 * 3 + 6 * 4)


def test_where_nothing_can_be_counted_nothing_is_claimed() -> None:
    found = told(TokenTask(16).model(), Count())
    assert {row["flops"] for row in (*found["rows"], found["total"])} == {None}
