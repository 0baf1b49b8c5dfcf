"""Promise: figures of a custom task that would come out wrong are refused, by name, before it trains."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import trainer
from tests.helpers.refusals import refused
from tests.helpers.small_task import Small
from trainer.observe.rows import why_no_metric
from trainer.tasks.custom import CustomTask
from trainer.train.start.from_python import Fitted

pytestmark = pytest.mark.usefixtures("here")

SIZES = {"data.global_batch_size": 4, "data.micro_batch_size": 2, "data.eval_batch_size": 2}
SETTINGS = {**SIZES, "data.workers": 0, "epochs": 4, "log.to": ["jsonl"], "parallel.threads": 1}
CLASSES = 300


class Classes(Small):
    """Many classes, of which an untrained model gets none right, and two numbers."""

    def data(self) -> Any:
        x = np.random.default_rng(0).normal(size=(12, 2)).astype(np.float32)
        return (part := {"x": x, "label": np.full(12, CLASSES - 1)}), part

    def model(self) -> nn.Module:
        model = nn.Linear(2, CLASSES)
        nn.init.constant_(model.bias[:1], 9)  # always class 0
        return model

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch.fields["x"]), batch.fields["label"], reduction="none")


def check(measure: Callable[..., Any], **more: Any) -> None:
    def measured(own: Any, model: nn.Module, batch: Any) -> Any:
        return {"loss": own.loss(model, batch), **measure(model(batch.fields["x"]), batch.fields)}

    CustomTask(type("Mine", (Classes,), {"measure": measured, **more})(), "mine").check()


NAMES: list[Any] = ["step", "eval/loss", 3, "", "a\nb", "x " * 100, "\ud800"]


@pytest.mark.parametrize("name", NAMES)
def test_names_that_rows_cannot_have_are_refused(name: Any) -> None:
    with refused("measure", repr(name)[:70]):
        check(lambda o, _f: {name: o[:, 0]})
    with refused("summarize", repr(name)[:70]):
        check(lambda o, _f: {"row": o}, summarize=lambda *_: {name: 1.0})
    if name == "a\nb":
        with refused("losses"):
            check(lambda _o, _f: {}, losses=("a", name))


def test_other_names_are_free() -> None:
    check(lambda o, _f: dict.fromkeys(("a b", "ünï/x", "loss/a", "lr", "steps", "0", "weight"), o[:, 0]))
    # Names that aren't told, and a type that torch has few kernels for.
    rows = {"measure": lambda o, f: {"step": o, "a\nb": o, "label": f["label"].to(torch.uint16)}}
    check(**rows, summarize=lambda *_: {"loss": 1.0})


@pytest.mark.parametrize(
    ("measure", "names"),
    [
        (lambda o, _f: {"row": o[:, : 1 + len(o)]}, "rows 'row' shape"),
        (lambda o, _f: {"row": o} if len(o) > 4 else {}, "rows 'row' shape"),
        (lambda _o, _f: {"a": "1.5"}, "'a' str"),
        (lambda o, f: {"a": (o[:, 0], f["label"].to(torch.uint16))}, "'a' uint16"),
        (lambda o, f: {"a": torch.autograd.grad(o.sum(), f["x"].requires_grad_())[0].sum()}, "enable_grad"),
    ],
    ids=["wider", "gone", "text", "counts", "gradients"],
)
def test_what_cannot_be_put_together_is_refused(measure: Callable[..., Any], names: str) -> None:
    with refused(names):
        check(measure, summarize=lambda *_: {"m": 1.0})


def test_a_field_that_has_no_name_is_refused() -> None:
    part = {"x": np.ones((8, 2), np.float32), 3: np.ones(8)}
    with refused("data field 3"):
        check(lambda _o, _f: {}, data=lambda _: (part, part))


def fit(kind: type = Small, settings: Any = None, **methods: Any) -> Fitted:
    return trainer.fit(type("Mine", (kind,), methods), {**SETTINGS, **(settings or {})})


@pytest.mark.parametrize(("resident", "last"), [(True, "cross"), (False, "weighted")])
def test_fields_may_have_our_names(resident: bool, last: str) -> None:
    """Arrays and a data set of torch, of one's own types and shapes: what is measured is what was given."""
    names = ("weight", "uniform", "a b", "", "num_item", "samples")

    def data(_: Any) -> Any:
        part = {**Small().data()[0], **{name: np.full((10, 3), 5, np.int64) for name in names}}
        return part, part

    def loss(own: Any, model: nn.Module, batch: Any) -> Any:
        return Small.loss(own, model, batch) * sum(batch[name][:, :1] for name in names)

    def measure(_: Any, __: nn.Module, batch: Any) -> Any:
        return {"loss": batch["x"].sum(1), **{f"of_{name}": batch[name].sum(1) for name in names}}

    settings = {"data.resident": resident, "data.last_batch": last}
    methods: dict[str, Any] = {"data": data, "loss": loss, "measure": measure}
    run = fit(settings=settings, **methods)
    assert {run.metrics[f"of_{name}"] for name in names} == {15.0}
    if not resident:
        again = fit(settings=settings, **methods, transforms=lambda _: lambda item: item)
        assert again.metrics == run.metrics


class Caching(nn.Linear):
    """Keeps what the largest batch so far has made it compute, as rotary embeddings do."""

    cache: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cache is None or len(self.cache) < len(x):
            self.cache = torch.linspace(0.5, 1.5, len(x))
        return super().forward(x) * self.cache[: len(x), None]


def adversarial(own: Any, model: nn.Module, batch: Any) -> Any:
    """Takes gradients, and leaves some at the parameters."""
    with torch.enable_grad():
        x = batch.fields["x"].clone().requires_grad_()
        own.loss(model, replace(batch, fields={**batch.fields, "x": x})).sum().backward()
    assert x.grad is not None
    worse = replace(batch, fields={**batch.fields, "x": x + 0.1 * x.grad.sign()})
    return {"loss": own.loss(model, batch), "attacked": own.loss(model, worse)}


def test_a_measure_may_cache_and_take_gradients() -> None:
    """And the training stays what it is without."""
    settings = {"epochs": 3, "data.eval_batch_size": 5}
    plain = fit(settings=settings)
    attacked = fit(settings=settings, measure=adversarial)
    assert attacked.metrics["attacked"] > attacked.metrics["loss"] == plain.metrics["loss"]
    fit(settings=settings, model=lambda _: Caching(2, 1))
    scripted = fit(settings=settings, model=lambda _: torch.jit.script(nn.Linear(2, 1)))
    assert scripted.metrics == plain.metrics


def test_another_metric_that_is_not_finite_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    def measure(own: Any, model: nn.Module, batch: Any) -> Any:
        return {"loss": own.loss(model, batch), "auc": model(batch.fields["x"]).abs() * float("inf")}

    run = fit(settings={"evaluation.patience": 3}, measure=measure)
    told = [line for line in capsys.readouterr().err.splitlines() if "auc" in line]
    assert told == ["trainer: the last evaluation isn't finite in auc (null in rows): it doesn't decide"]

    text = (run.folder / "manifest.json").read_text()
    assert "Infinity" not in text and json.loads(text)["status"] == "finished"
    with refused("finite diverged", by=trainer.DivergedError):
        fit(measure=measure, metric="auc", mode="max")


def test_what_rows_say_of_themselves_is_reserved() -> None:
    """Whatever an evaluation's row, or the last one, has besides metrics is no name for one."""
    run = fit()
    own = {name for kind in ("eval", "end") for row in run.rows(kind) for name in row} - {"loss"}
    assert own and all(why_no_metric(name) for name in own)


@pytest.mark.parametrize(("count", "names"), [(-1, "sample 7 num_items -1"), (0, "evaluation")])
def test_items_of_a_data_set_that_cannot_be_counted(count: int, names: str) -> None:
    class Counted(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 10

        def __getitem__(self, sample: int) -> Any:
            number = count if sample == 7 or not count else 1
            return {"x": np.ones(2, np.float32), "y": np.ones(1, np.float32), "num_items": np.int64(number)}

    def mean(_: Any, model: nn.Module, batch: Any) -> Any:
        return Small().loss(model, batch).mean()

    means: dict[str, Any] = {"loss": mean, "measure": lambda *given: {"loss": mean(*given)}}
    with refused(names):
        fit(data=lambda _: (Small().data()[0], Counted()), reduction="mean", **means)
