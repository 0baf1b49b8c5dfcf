"""Promise P3, P10: what a task watches while it trains is right over micro-batches, and changes no bit."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.refusals import refused
from tests.helpers.small_task import Small
from tests.helpers.steps import assert_same_bits
from trainer import fit

pytestmark = pytest.mark.usefixtures("here")
_STEPS = {"epochs": 2, "data.global_batch_size": 10, "log.every": 1}
_SETTINGS = {**_STEPS, "parallel.threads": 1, "optim.lr": 0.1}


class Watched(Small):
    watched: tuple[str, ...] = ("near", "norm", "odd")

    def loss(self, model: nn.Module, batch: Any) -> Any:
        given, y = model(batch["x"]), batch["y"]
        return {
            "loss": F.mse_loss(given, y, reduction="none"),
            "near": (given - y).abs() < 0.5,  # bools
            "norm": given.norm(dim=1),  # with a graph
            "odd": torch.full((len(y),), math.nan),
        }

    def measure(self, model: nn.Module, batch: Any) -> Any:
        return {"loss": super().loss(model, batch)}


def _run(task: type, micro: int) -> Any:
    return fit(task, {**_SETTINGS, "data.micro_batch_size": micro})


def test_watched_figures_are_means_over_the_step_and_are_not_trained() -> None:
    plain, run, split = _run(Small, 10), _run(Watched, 10), _run(Watched, 5)
    assert_same_bits({**run.model().state_dict()}, {**plain.model().state_dict()})
    first, rows, parts = plain.rows(), run.rows(), split.rows()
    assert [row["loss"] for row in rows] == [row["loss"] for row in first]
    assert {"watched/near", "watched/norm"} < rows[0].keys() and "loss/loss" not in rows[0]
    for row, part in zip(rows, parts, strict=True):
        assert row["watched/near"] * 10 == pytest.approx(round(row["watched/near"] * 10))
        assert part["watched/near"] == pytest.approx(row["watched/near"], abs=1e-6)
        assert part["watched/norm"] == pytest.approx(row["watched/norm"], rel=1e-5)
        assert row["watched/odd"] is None, "seen: not a finite number"
    assert any(0 < row["watched/near"] < 1 for row in rows)


def mean(own: Watched, model: nn.Module, batch: Any) -> Any:
    parts = Watched.loss(own, model, batch)
    return {**parts, "norm": parts["norm"].mean()}


@pytest.mark.parametrize(
    ("changed", "names"),
    [({"loss": mean}, "norm"), ({"watched": ("near", "norm", "odd", "more")}, "losses watched")],
)
def test_what_is_watched_is_checked_before_the_training(changed: dict[str, Any], names: str) -> None:
    with refused(names):
        fit(type("Mine", (Watched,), changed), _SETTINGS)
