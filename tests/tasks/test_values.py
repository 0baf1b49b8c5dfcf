"""Promise: of a custom task's values a step makes the gradient of one big batch, however it is split."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import trainer
from tests.helpers.refusals import named, refused
from tests.helpers.small_task import Small
from tests.helpers.steps import ALONE
from tests.helpers.toys import build_alone, make_recipe
from tests.helpers.world import Ranks
from trainer.distributed.parallel import World
from trainer.tasks.custom import CustomTask
from trainer.tasks.values import means
from trainer.train.components.operations import shapes_only
from trainer.train.components.run import build
from trainer.train.step import take_metrics, train_step

SAMPLES, PLACES, KINDS = 12, 5, 4
F64 = torch.float64


class Tokens:
    """Sequences of unlike length, in float64."""

    losses: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()

    def data(self) -> Any:
        random = np.random.default_rng(3)
        length = random.integers(1, PLACES + 1, SAMPLES)
        y = np.where(np.arange(PLACES) < length[:, None], random.integers(0, KINDS, (SAMPLES, PLACES)), -100)
        rows = {"x": random.normal(size=(SAMPLES, PLACES, 3)), "y": y, **self.more(length)}
        return rows, {name: row[:7] for name, row in rows.items()}

    def more(self, _: Any) -> dict[str, Any]:
        return {}

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 6, dtype=F64), nn.Tanh(), nn.Linear(6, KINDS, dtype=F64))

    def each(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]).mT, batch["y"], reduction="none")

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return self.each(model, batch).sum(1)

    def measure(self, model: nn.Module, batch: Any) -> Any:
        return {"loss": self.each(model, batch).sum(1)}


class Masked(Tokens):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        mask = batch["y"] >= 0
        return self.each(model, batch).masked_fill(~mask, 1e9), mask


class Weighted(Tokens):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        counts = (batch["y"] >= 0) * (0.5 + batch["x"][..., 0].abs())
        return self.each(model, batch).masked_fill(counts == 0, torch.nan), counts


class Mean(Tokens):
    """As a model of transformers has it: over the tokens of the micro-batch."""

    reduction = "mean"

    def more(self, _: Any) -> dict[str, Any]:
        return {"num_items": _}

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch["x"]).mT, batch["y"])


class Penalized(Tokens):
    """A mean beside masked values, and a figure that is watched."""

    reduction = "mean"
    losses = ("fit", "penalty")
    watched = ("right",)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        mask, right = batch["y"] >= 0, model(batch["x"]).argmax(2) == batch["y"]
        penalty = 0.1 * model[0].weight.square().sum()  # type: ignore[index]
        return {"fit": (self.each(model, batch), mask), "penalty": penalty, "right": (right, mask)}


def of_one_batch(own: Any) -> list[torch.Tensor]:
    """The gradient of all samples at once, by hand for each of the five: it calls none of their losses."""
    fields, model = {n: torch.from_numpy(a) for n, a in own.data()[0].items()}, own.model()
    y, log = fields["y"], model(fields["x"]).log_softmax(2)
    valid = y >= 0
    nats = torch.where(valid, -log.gather(2, y.clamp(min=0)[..., None])[..., 0], 0.0)
    if isinstance(own, Weighted):
        weight = valid * (0.5 + fields["x"][..., 0].abs())
        loss = (nats * weight).sum() / weight.sum()
    elif isinstance(own, Mean | Masked | Penalized):
        loss = nats.sum() / valid.sum()
        if isinstance(own, Penalized):
            loss = loss + 0.1 * model[0].weight.pow(2).sum()
    else:
        loss = nats.sum() / len(y)
    return [*torch.autograd.grad(loss, [*model.parameters()])]


def gradients(world: World, kind: int, micro: int, reduction: str, last: str) -> list[list[torch.Tensor]]:
    """Those of a run's first steps, which don't move the weights."""
    task, size = CustomTask(OWN[kind](), "own"), 8 if last == "weighted" else 12
    recipe = make_recipe(
        data={"global_batch_size": size, "micro_batch_size": micro, "last_batch": last},
        optim={"name": "sgd", "lr": 1e-30, "momentum": 0.0, "max_grad_norm": 0.0},
        parallel={"threads": 1, "reduction": reduction},
    )
    run, seen = build(recipe, task, world, 0), list[list[torch.Tensor]]()

    def look(*_: Any) -> None:
        seen.append([p.grad.clone() for p in run.gradients.parameters if p.grad is not None])

    run.state.optimizer.register_step_pre_hook(look)
    run.replica.train()
    batches = run.loader(run.share.batches())
    for step in range(run.steps):
        train_step(run, batches, step)
        seen.append([*take_metrics(run).values()])
    run.close()
    return seen


OWN: list[type[Tokens]] = [Tokens, Masked, Weighted, Mean, Penalized]
close: Any = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", range(5))
@pytest.mark.parametrize("micro", [4, 1])
def test_a_step_has_the_gradient_of_one_batch(kind: int, micro: int) -> None:
    wanted = of_one_batch(OWN[kind]())
    for reduction in ("all_reduce", "tree"):
        found, (loss, *_) = gradients(ALONE, kind, micro, reduction, "cross")
        assert 0 < float(loss) < 9, "also where what doesn't count is NaN, or large"
        close(found, wanted)


@pytest.mark.parametrize("reduction", ["all_reduce", "tree"])
def test_ranks_divide_by_what_counts_on_all(ranks: Ranks, reduction: str) -> None:
    for kind in range(5):
        both = ranks.run(2, gradients, kind, 2, reduction, "cross")
        close([found for found, *_ in both], [of_one_batch(OWN[kind]())] * 2)


def test_a_last_batch_of_fewer_samples_is_their_mean() -> None:
    """Of 12 samples in batches of 8 the last has 4, and padding beside them."""
    for kind in range(5):
        whole, parts = (gradients(ALONE, kind, micro, "all_reduce", "weighted")[-2] for micro in (8, 1))
        close(whole, parts)


class Line(Small):
    """Four samples of two numbers; what it gives is put in by a test."""

    def data(self) -> Any:
        x = np.arange(8, dtype=np.float32).reshape(4, 2) / 8
        return (part := {"x": x, "y": x[:, 0]}), part

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return (model(batch["x"])[:, 0] - batch["y"]).square()

    def measure(self, model: nn.Module, batch: Any) -> Any:
        return {"loss": Line.loss(self, model, batch)}


def check(**methods: Any) -> CustomTask:
    task = CustomTask(type("Mine", (Line,), methods)(), "mine")
    task.check()
    return task


def out(model: nn.Module, batch: Any) -> Any:
    return model(batch["x"])


GOOD: dict[str, Callable[..., Any]] = {
    "a value": lambda _, m, b: out(m, b)[:, 0],
    "(n, 1)": lambda _, m, b: out(m, b),
    "bools": lambda _, m, b: (out(m, b).expand(-1, 3), torch.ones(len(b["x"]), 3) > 0),
    "weights": lambda _, m, b: (out(m, b).expand(-1, 3), torch.ones(len(b["x"]), 3)),
    "of samples": lambda _, m, b: (out(m, b)[:, 0], b["y"] > 0.3),
}
BAD: dict[str, tuple[Callable[..., Any], str]] = {
    "a sum": (lambda _, m, b: out(m, b).sum(), "loss reduction none mean"),
    "more dimensions": (lambda _, m, b: out(m, b).expand(-1, 8), "4 8 .sum(1) .mean(1) counts"),
    "each with each": (lambda _, m, b: (out(m, b) - b["y"]).square(), "4 .sum(1) minus"),
    "other samples": (lambda _, m, b: out(m, b)[:2, 0], "2 4"),
    "counts of another shape": (lambda _, m, b: (out(m, b).expand(-1, 3), b["y"] > 0), "4 3 counts"),
    "counts below 0": (lambda _, m, b: (out(m, b)[:, 0], b["y"] - 1), "counts 0"),
    "counts that learn": (lambda _, m, b: (out(m, b)[:, 0], out(m, b)[:, 0].exp()), "counts gradient detach"),
    "nothing": (lambda *_: None, "loss nothing"),
    "no gradient": (lambda _, m, b: out(m, b).detach(), "gradient"),
    "whole numbers": (lambda _, m, b: out(m, b).long(), "int64"),
}


@pytest.mark.parametrize("form", GOOD)
def test_what_a_loss_may_be(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    check(loss=GOOD[form])
    check(measure=lambda *given: {"loss": GOOD[form](*given), "of pairs": GOOD["bools"](*given)})
    assert not capsys.readouterr().err


@pytest.mark.parametrize("form", BAD)
def test_what_a_loss_is_not(form: str) -> None:
    given, words = BAD[form]
    with refused(words):
        check(loss=given)
    if form not in ("no gradient", "whole numbers", "counts below 0", "counts that learn"):
        with refused(words.replace("loss", "figure")):
            check(measure=lambda *one: {"loss": GOOD["a value"](*one), "figure": given(*one)})


def test_a_model_may_read_values_of_tensors() -> None:
    task = check(model=lambda own: nn.Sequential(Line.model(own), nn.Dropout(torch.zeros(()).item())))
    assert next(shapes_only(task).parameters()).is_meta


def test_losses_of_a_step_have_one_divisor() -> None:
    """A gradient is divided once: two masks can't both be right."""

    with refused("counts"):
        check(loss=lambda *g: {"a": GOOD["a value"](*g), "b": GOOD["of samples"](*g)}, losses=("a", "b"))

    class Turns(Line):
        begun, calls = False, 0

        def loss(self, model: nn.Module, batch: Any) -> Any:
            self.calls += self.begun
            return GOOD["of samples" if self.calls > 1 else "a value"](self, model, batch)

    own, sizes = Turns(), {"global_batch_size": 4, "micro_batch_size": 2}
    run = build_alone(make_recipe(data=sizes), CustomTask(own, "own"))
    own.begun = True
    with refused("loss counts"):
        train_step(run, run.loader(run.share.batches()), 0)
    run.close()


def test_the_field_num_items_weighs_means_alone() -> None:
    def data(_: Any) -> Any:
        part = {**Line().data()[0], "num_items": np.array([1, 2, 3, 4])}
        return part, part

    with refused('num_items reduction "mean" counts'):
        check(data=data)
    with refused("num_items mean"):
        check(data=data, reduction="mean")
    with refused("reduction sum mean"):
        check(reduction="sum")
    measured = {"measure": lambda _, m, b: {"loss": out(m, b).square().mean()}}
    task = check(reduction="mean", data=data, loss=lambda _, m, b: out(m, b).mean(), **measured)
    assert "depends on the micro-batch" in task.notes[0]


def test_narrow_values_are_added_up_in_float32() -> None:
    class Narrow(Line):
        def loss(self, model: nn.Module, batch: Any) -> Any:
            return super().loss(model, batch).bfloat16()

    task = CustomTask(Narrow(), "own")
    batch: Any = trainer.Batch({"x": torch.full((1000, 2), 0.1), "y": torch.zeros(1000)}, None, None, 1000)
    loss = task.loss(model := nn.Linear(2, 1), batch)
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float(Narrow().loss(model, batch).double().sum()), rel=1e-5)


def noisy(_: Any, model: nn.Module, batch: Any) -> Any:
    return (out(model, batch)[:, 0] - torch.randn(len(batch["x"]))).square()


COMPARES: dict[str, tuple[bool, Callable[..., Any]]] = {
    "an expanded mean": (True, lambda _, m, b: out(m, b).square().mean().expand(len(b["x"]))),
    "contrast": (True, lambda _, m, b: (out(m, b) @ b["y"][None]).softmax(1)[:, 0]),
    "each alone": (False, GOOD["a value"]),
    "drawn": (False, noisy),
    "masks": (False, GOOD["bools"]),
}


@pytest.mark.parametrize("kind", COMPARES)
def test_a_loss_that_compares_samples_is_told(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    told, loss = COMPARES[kind]
    task = check(loss=loss, measure=lambda _, m, b: {"loss": GOOD["a value"](_, m, b)})
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == told
    assert not told or named(lines[0], "loss data.micro_batch_size")
    assert bool(task.notes) == (kind == "drawn")
    if kind not in ("drawn", "masks"):
        check(measure=lambda *given: {"loss": GOOD["a value"](*given), "figure": loss(*given).detach()})
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == told and (not told or named(lines[0], "figure data.eval_batch_size"))


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(3, 1, scale_grad_by_freq=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.rows((x[:, 0] > 9).long())


class Clipped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(lambda g: g.clamp(-1, 1))
        return x


def hooked(hook: Callable[[torch.Tensor], Any]) -> Callable[..., nn.Module]:
    def model(_: object) -> nn.Module:
        made = nn.Linear(2, 1)
        made.weight.register_hook(hook)
        return made

    return model


GRADIENTS: dict[str, tuple[bool, Callable[..., Any]]] = {
    "clipped": (True, hooked(lambda g: g.clamp(-1, 1))),
    "with a decay": (True, hooked(lambda g: g + 0.01)),
    "by rows": (True, lambda _: Rows()),
    "within": (True, lambda _: nn.Sequential(nn.Linear(2, 1), Clipped())),
    "scaled": (False, hooked(lambda g: g * 0.1)),
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_a_gradient_that_is_not_in_proportion_is_told(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    told, model = GRADIENTS[kind]
    check(model=model)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == told and (not told or named(lines[0], "weight data.micro_batch_size"))


def classes(model: nn.Module, batch: Any, **more: Any) -> torch.Tensor:
    logits = torch.cat((out(model, batch), -out(model, batch)), 1)
    return F.cross_entropy(logits, more.pop("label", (batch["y"] > 0.3).long()), **more)


MEANS: dict[str, tuple[str | None, Callable[..., Any]]] = {
    "mean": ("equal", lambda _, m, b: classes(m, b)),
    "class weights": ("depends", lambda _, m, b: classes(m, b, weight=torch.tensor([1.0, 9.0]))),
    "random": ("random", lambda _, m, b: noisy(_, m, b).mean()),
    "ignored in a half": ("item", lambda _, m, b: classes(m, b, label=torch.where(b["y"] > 0.3, -100, 0))),
    "a sum": (None, lambda _, m, b: classes(m, b, reduction="sum")),
}


@pytest.mark.parametrize("kind", MEANS)
def test_a_mean_of_four_is_compared_with_that_of_two_and_two(kind: str) -> None:
    told, loss = MEANS[kind]
    methods: dict[str, Any] = {"reduction": "mean", "loss": loss}
    if told is None:
        with refused('sum reduction "mean" none'):
            check(**methods)
        return
    task = check(**methods)
    (line,) = (note for note in task.notes if told in note)
    assert task.tried["means"] in line and task.anew().notes == task.notes


@pytest.mark.usefixtures("here")
def test_each_figure_is_divided_by_its_own_counts() -> None:
    def measured(own: Any, model: nn.Module, batch: Any) -> Any:
        mask, each = batch["y"] >= 0, own.each(model, batch)
        exact = torch.ones(len(mask), dtype=torch.bool)
        return {"loss": (each, mask), "sum": each.sum(1), "exact": exact, "tokens": (mask, mask)}

    sizes = {"data.global_batch_size": 4, "data.micro_batch_size": 2, "data.eval_batch_size": 3}
    settings = {"max_steps": 1, "optim.lr": 1e-30, "parallel.threads": 1, **sizes}
    run = trainer.fit(type("Mine", (Masked,), {"measure": measured}), settings)
    assert (run.metrics["exact"], run.metrics["tokens"]) == (1.0, 1.0)
    length = (Tokens().data()[1]["y"] >= 0).sum()
    assert run.metrics["sum"] * 7 / length == pytest.approx(run.metrics["loss"], rel=1e-12)

    def summarize(_: Any, rows: Any) -> Any:
        return {**means(rows), "width": rows["loss"][0].shape[1]}

    rows = trainer.fit(type("Mine", (Masked,), {"measure": measured, "summarize": summarize}), settings)
    assert rows.metrics == pytest.approx({**run.metrics, "width": PLACES}, rel=1e-12)
