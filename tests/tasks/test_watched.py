"""Promise P3, P10: what a task watches while it trains is right over micro-batches, and changes no bit."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.refusals import refused
from trainer import fit

_POINTS = np.random.default_rng(0).standard_normal((60, 2)).astype(np.float32)
_LABELS = (_POINTS.sum(1) > 0).astype(np.int64)
_SETTINGS = {
    "epochs": 1,
    "data.global_batch_size": 20,
    "log.every": 1,
    "parallel.threads": 1,
    "optim.lr": 0.1,
}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # runs are left in the current one


class Plain:
    def data(self) -> Any:
        arrays = {"point": _POINTS, "label": _LABELS}
        return arrays, arrays

    def model(self) -> nn.Module:
        return nn.Linear(2, 2)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch.fields["point"]), batch.fields["label"], reduction="none")

    def measure(self, model: nn.Module, batch: Any) -> Any:
        return {"loss": Plain.loss(self, model, batch)}


class Watched(Plain):
    watched: tuple[str, ...] = ("accuracy", "norm", "odd")

    def loss(self, model: nn.Module, batch: Any) -> Any:
        logits, label = model(batch.fields["point"]), batch.fields["label"]
        return {
            "loss": F.cross_entropy(logits, label, reduction="none"),
            "accuracy": logits.argmax(1) == label,  # bools
            "norm": logits.norm(dim=1),  # with a graph
            "odd": torch.full((len(label),), math.nan),
        }


def _run(task: type, micro: int) -> Any:
    return fit(task, {**_SETTINGS, "data.micro_batch_size": micro})


def test_watched_figures_are_means_over_the_step_and_are_not_trained() -> None:
    plain, run, split = _run(Plain, 20), _run(Watched, 20), _run(Watched, 5)
    for name, tensor in plain.model().state_dict().items():
        assert torch.equal(tensor, run.model().state_dict()[name]), "no bit of the weights is another"
    first, rows, parts = plain.rows(), run.rows(), split.rows()
    assert [row["loss"] for row in rows] == [row["loss"] for row in first]
    assert {name for name in rows[0] if "/" in name and not name.startswith("time/")} & {
        "watched/accuracy",
        "watched/norm",
        "loss/loss",
    } == {"watched/accuracy", "watched/norm"}
    for row, part in zip(rows, parts, strict=True):
        assert row["watched/accuracy"] * 20 == pytest.approx(round(row["watched/accuracy"] * 20))
        assert part["watched/accuracy"] == pytest.approx(row["watched/accuracy"], abs=1e-6)
        assert part["watched/norm"] == pytest.approx(row["watched/norm"], rel=1e-5)
        assert row["watched/odd"] is None, "seen: not a finite number"
    assert 0 < rows[0]["watched/accuracy"] < 1


class Mean(Watched):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        parts = super().loss(model, batch)
        return {**parts, "norm": parts["norm"].mean()}


class Missing(Watched):
    watched = ("accuracy", "norm", "odd", "more")


@pytest.mark.parametrize(("task", "names"), [(Mean, "norm"), (Missing, "losses watched")])
def test_what_is_watched_is_checked_before_the_training(task: type, names: str) -> None:
    with refused(names):
        fit(task, _SETTINGS)
