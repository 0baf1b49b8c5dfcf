"""Promise: `log.layers_every` tells what flows through each part, and changes no bit of what is learned."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.forked import attempt
from tests.helpers.rows import read_rows
from tests.helpers.steps import assert_same_bits
from tests.helpers.toys import SMALL, TokenTask, build_alone, make_recipe, rows_to
from tests.helpers.world import Ranks
from trainer.config.recipe import Recipe
from trainer.distributed.parallel import World
from trainer.models.layers import LayerStatistics
from trainer.train.build import build
from trainer.train.loop import train
from trainer.train.outputs import _layers_to
from trainer.train.report.page import page
from trainer.train.report.read import read_run
from trainer.train.state import Run, tensors_of

CPU = torch.device("cpu")
DATA = {"global_batch_size": 8, "micro_batch_size": 4, "workers": 0}


def told(run: Run) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    out = rows_to(run, lambda row: rows.append(dict(row)))
    if run.layers is not None:
        out = replace(out, each_step=(_layers_to(out.logger, run.layers),))
    train(run, out)
    run.close()
    return rows


class Fixed(TokenTask):
    """What its model gave and its gradients are, as told by itself."""

    def __init__(self) -> None:
        super().__init__(16, ragged=False, blocks=1)
        self.given: list[torch.Tensor] = []

    def model(self) -> nn.Module:
        model = super().model()
        last = model.get_submodule("3")
        last.register_forward_hook(lambda _m, _i, out: self.given.append(out.detach().clone()))
        return model


def test_activations_are_those_of_all_micro_batches_of_a_step() -> None:
    task = Fixed()
    run = build_alone(make_recipe(max_steps=2, data=DATA, log={"every": 1, "layers_every": 2}), task)
    task.given.clear()
    rows = told(run)
    (row,) = (row for row in rows if row["kind"] == "layers")
    assert row["step"] == 2
    values = torch.cat(task.given[2:4]).flatten()  # the evaluation comes after them
    assert row["act_rms/3"] == pytest.approx(values.square().mean().sqrt().item(), rel=1e-6)
    assert row["act_max/3"] == pytest.approx(values.abs().max().item(), rel=1e-6)
    assert (row["act_zeros/3"], row["act_nonfinite/3"]) == (0, 0)


def test_gradients_of_all_parts_make_the_gradient_norm() -> None:
    recipe = make_recipe(data=DATA, log={"every": 1, "layers_every": 1}, optim={"max_grad_norm": 0.01})
    run = build_alone(recipe, TokenTask(16, ragged=False, blocks=2))
    numbers = {name: sum(p.numel() for p in part.parameters()) for name, part in _parts(run).items()}
    rows = told(run)
    layers = [row for row in rows if row["kind"] == "layers"]
    norms = [row["grad_norm"] for row in rows if row["kind"] == "train"]
    assert len(layers) == len(norms) == 2
    for row, norm in zip(layers, norms, strict=True):
        squares = sum(row[f"grad_rms/{name}"] ** 2 * count for name, count in numbers.items() if count)
        assert math.sqrt(squares) == pytest.approx(norm, rel=1e-6)


def _parts(run: Run) -> dict[str, nn.Module]:
    return {name: run.state.model.get_submodule(name) for name in ("0", "2.0", "2.1", "3")}


@pytest.mark.parametrize(
    "memory", [{}, {"checkpointing": "blocks"}, {"checkpointing": "names", "names": ["2"]}]
)
def test_no_bit_changes(memory: Any) -> None:
    ends = []
    rows: list[list[dict[str, Any]]] = []
    for every in (0, 1, 3):
        recipe = make_recipe(
            epochs=3, data=DATA, memory=memory, log={"every": 2, "layers_every": every}, ema={"decay": 0.9}
        )
        run = build_alone(recipe, TokenTask(16, ragged=False, dtype=torch.float32, blocks=2, dropout=0.3))
        rows.append([row for row in told(run) if row["kind"] == "layers"])
        ends.append(tensors_of(run.state))
    assert [[row["step"] for row in some] for some in rows] == [[], [1, 2, 3, 4, 5, 6], [3, 6]]
    assert rows[2] == [rows[1][2], rows[1][5]]
    assert_same_bits(ends[0], ends[1])
    assert_same_bits(ends[0], ends[2])


def test_checkpointed_blocks_tell_the_same() -> None:
    rows = []
    for memory in ({}, {"checkpointing": "blocks"}, {"checkpointing": "names", "names": ["2"]}):
        recipe = make_recipe(data=DATA, memory=memory, log={"every": 1, "layers_every": 1})
        rows.append(
            [one for one in told(build_alone(recipe, TokenTask(16, blocks=2))) if one["kind"] == "layers"]
        )
    for others in rows[1:]:
        for row, other in zip(rows[0], others, strict=True):
            assert other == pytest.approx(row, rel=1e-12)


def test_zeros_and_what_is_not_finite_are_counted() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Linear(4, 1))
    looks = LayerStatistics(model, 1, CPU)
    looks.begin_step(0)
    with torch.no_grad():
        model(torch.tensor([[-1.0, 0.0, 2.0, math.inf]]))
    looks.end_step()
    flow = looks.take()
    assert flow is not None and looks.take() is None
    metrics = flow.metrics(flow.values.tolist())
    assert (metrics["act_zeros/0"], metrics["act_nonfinite/0"], metrics["act_max/0"]) == (0.5, 0.25, math.inf)
    model(torch.ones(1, 4))  # between two steps nothing is looked at
    assert looks.take() is None


def _reduced(world: World, recipe: dict[str, Any]) -> list[dict[str, Any]]:
    run = build(Recipe.model_validate(recipe), TokenTask(16, ragged=False, blocks=1), world, 0)
    assert (run.layers is None) == (world.rank > 0)
    return told(run)


@pytest.mark.parametrize("reduction", ["all_reduce", "tree"])
def test_gradients_are_of_all_ranks(ranks: Ranks, reduction: str) -> None:
    recipe = {
        "epochs": 1,
        "data": {**DATA, "micro_batch_size": 2},
        "log": {"every": 1, "layers_every": 1},
        "parallel": {"threads": 1, "reduction": reduction},
    }
    alone, two = (
        [row for row in ranks.run(count, _reduced, recipe)[0] if row["kind"] == "layers"] for count in (1, 2)
    )
    assert len(alone) == 2
    for row, other in zip(alone, two, strict=True):
        gradients = {name: value for name, value in row.items() if name.startswith("grad_")}
        assert {name: other[name] for name in gradients} == pytest.approx(gradients, rel=1e-12)


def test_a_resumed_run_tells_every_row_once(tmp_path: Path) -> None:
    """A checkpoint comes between two rows of metrics: what was looked at before it is written before it."""
    values = {**SMALL, "epochs": 1, "max_steps": 9, "parallel": {"threads": 1}}
    values["log"] = {"every": 4, "layers_every": 1, "to": ["jsonl"]}
    values["checkpoint"] = {"every": 3, "minutes": 0}
    recipe = Recipe.model_validate(values)
    assert attempt(tmp_path / "whole", recipe).code == 0
    assert attempt(tmp_path / "cut", recipe, stop_after=6).code == 75
    assert attempt(tmp_path / "cut", recipe).code == 0
    whole, cut = (read_rows(tmp_path / name, ("layers",)) for name in ("whole", "cut"))
    assert [row["step"] for row in whole] == list(range(1, 10))
    assert cut == whole
    html = page([read_run(tmp_path / "cut")])
    assert "<h2>Layers</h2>" in html
    assert re.search(r">blocks\.0</text>", html)
    assert html.count('class="plot heat"') == 3


def test_a_model_that_is_compiled_as_a_whole_is_refused() -> None:
    with pytest.raises(ValueError, match=r"compile\.scope=blocks, or compile\.mode=none"):
        make_recipe(log={"layers_every": 1}, compile={"mode": "default"})
    make_recipe(log={"layers_every": 1}, compile={"mode": "default", "scope": "blocks"})
