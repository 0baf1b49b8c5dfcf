"""Promise P3, P10: what a task watches while it trains is right over micro-batches, and changes no bit."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.refusals import refused
from tests.helpers.small_task import Small
from trainer import fit

_SETTINGS = {
    "epochs": 2,
    "data.global_batch_size": 10,
    "log.every": 1,
    "parallel.threads": 1,
    "optim.lr": 0.1,
}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # runs are left in the current one


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
    for name, tensor in plain.model().state_dict().items():
        assert torch.equal(tensor, run.model().state_dict()[name]), "no bit of the weights is another"
    first, rows, parts = plain.rows(), run.rows(), split.rows()
    assert [row["loss"] for row in rows] == [row["loss"] for row in first]
    assert {"watched/near", "watched/norm"} < rows[0].keys() and "loss/loss" not in rows[0]
    for row, part in zip(rows, parts, strict=True):
        assert row["watched/near"] * 10 == pytest.approx(round(row["watched/near"] * 10))
        assert part["watched/near"] == pytest.approx(row["watched/near"], abs=1e-6)
        assert part["watched/norm"] == pytest.approx(row["watched/norm"], rel=1e-5)
        assert row["watched/odd"] is None, "seen: not a finite number"
    assert any(0 < row["watched/near"] < 1 for row in rows)


class Mean(Watched):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        parts = super().loss(model, batch)
        return {**parts, "norm": parts["norm"].mean()}


class Missing(Watched):
    watched = ("near", "norm", "odd", "more")


@pytest.mark.parametrize(("task", "names"), [(Mean, "norm"), (Missing, "losses watched")])
def test_what_is_watched_is_checked_before_the_training(task: type, names: str) -> None:
    with refused(names):
        fit(task, _SETTINGS)
