"""Promise: a run begins with a table of its model, whose figures are right and cost no start-up time."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.helpers.refusals import named
from tests.helpers.toys import LENGTH, TokenTask, make_recipe
from trainer.models.parts import parts
from trainer.observe.console import ProgressBar, aligned
from trainer.observe.flops import Count
from trainer.train.components.memory import ROWS, describe_model, show_model
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


class Besides(TokenTask):
    """Multiplies outside of every module, in a loss of its own."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        logits = model(batch.fields["x"].to(self.dtype)) @ torch.ones(4, 4, dtype=self.dtype)
        return F.cross_entropy(logits.flatten(0, 1), batch.fields["y"].flatten(), reduction="sum")


def test_what_no_part_computes_stands_beside_them() -> None:
    model, count = counted(Besides(16, ragged=False))
    assert count.by_part[""] == 2 * (2 * LENGTH * 4 * 4)
    recipe = make_recipe(data={"global_batch_size": 8, "micro_batch_size": 4})
    last = describe_model(recipe, model, parts(model, ROWS), count)["rows"][-1]
    assert (last["block"], last["parameters"], last["flops"]) == ("(besides)", 0, 8 * count.by_part[""])


@pytest.mark.parametrize(
    ("optim", "ema", "copies"),
    [
        ({"name": "adamw"}, {}, 4),
        ({"name": "sgd"}, {}, 3),
        ({"name": "sgd", "momentum": 0}, {}, 2),
        ({"name": "adamw"}, {"decay": 0.9}, 5),
    ],
)
def test_memory_is_what_the_first_step_holds(optim: Any, ema: Any, copies: int) -> None:
    task = TokenTask(16, ragged=False, dtype=torch.float32, blocks=1)
    model, count = counted(task)
    recipe = make_recipe(data={"global_batch_size": 8, "micro_batch_size": 4}, optim=optim, ema=ema)
    told = describe_model(recipe, model, parts(model, ROWS), count)
    numbers = sum(p.numel() for p in model.parameters())
    assert told["total"]["parameters"] == told["total"]["trainable"] == numbers
    assert told["total"]["bytes"] == copies * 4 * numbers
    assert told["total"]["flops"] == 8 * count.per_sample


def test_frozen_weights_have_no_gradients() -> None:
    model, count = counted(TokenTask(16, ragged=False, dtype=torch.float32))
    first: Any = next(model.children())
    first.requires_grad_(False)
    row = describe_model(make_recipe(), model, parts(model, ROWS), count)["rows"][0]
    assert (row["parameters"], row["trainable"], row["bytes"]) == (24, 0, 4 * 24)


def test_muon_keeps_one_moment_of_a_matrix() -> None:
    model, count = counted(TokenTask(16, ragged=False, dtype=torch.float32, blocks=1))
    recipe = make_recipe(optim={"name": "muon"})
    rows = describe_model(recipe, model, parts(model, ROWS), count)["rows"]
    block = next(row for row in rows if row["block"].startswith("2"))
    assert block["bytes"] == 4 * (36 * 3 + 6 * 4)


def test_the_state_of_an_optimizer_that_nobody_knows_is_not_counted(capsys: Any) -> None:
    model, count = counted(TokenTask(16, ragged=False, dtype=torch.float32, blocks=1))
    told = describe_model(make_recipe(), model, parts(model, ROWS), count, own_optimizer=True)
    assert told["total"]["bytes"] == 2 * 4 * sum(p.numel() for p in model.parameters())
    show_model(told, ProgressBar(1), CPU)
    assert named(capsys.readouterr().out, "weights gradients")


def test_where_nothing_can_be_counted_nothing_is_claimed(capsys: Any) -> None:
    model = TokenTask(16).model()
    told = describe_model(make_recipe(), model, parts(model, ROWS), Count())
    assert {row["flops"] for row in (*told["rows"], told["total"])} == {None}
    show_model(told, ProgressBar(1), CPU)
    assert [line.split()[-3] for line in capsys.readouterr().out.splitlines()[1:-1]] == ["–"] * 3  # noqa: RUF001


def test_plain_lines_stand_below_each_other(capsys: Any) -> None:
    assert aligned([["a", "1"], ["long", "22"]], right=[1]) == ["a      1", "long  22"]
    model, count = counted(TokenTask(16, ragged=False))
    show_model(describe_model(make_recipe(), model, parts(model, ROWS), count), ProgressBar(1), CPU)
    out = capsys.readouterr().out.splitlines()
    assert len({line.rindex("B") for line in out[1:-1]}) == 1
    assert out[0].split() == ["part", "parameters", "trainable", "FLOPs", "a", "step", "memory"]
    assert "activations come on top" in out[-1]


def test_a_terminal_gets_a_drawn_table(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    progress_bar = ProgressBar(1)
    progress_bar.table(["part", "n"], [["[red]0", "1"], ["all", "1"]], right=[1], last_is_total=True)
    progress_bar.close()
    shown = capsys.readouterr().out
    assert "─" in shown and "[red]0" in shown
