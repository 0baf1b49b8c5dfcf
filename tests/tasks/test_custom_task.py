"""Promise: what is wrong in a custom task is said before it trains; what is right passes."""

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trainer
from tests.helpers import small_task
from tests.helpers.preparing import prepare_only
from tests.helpers.refusals import named, refusal, refused
from tests.helpers.small_task import Small
from trainer.cli import main
from trainer.config.recipe import Recipe
from trainer.config.section import validated
from trainer.data.batch import Batch
from trainer.data.dataset import ArrayDataset
from trainer.errors import BadInputError
from trainer.tasks.custom import CustomTask, custom_task, recipe_of
from trainer.train.start import job as start


def check(**methods: Any) -> None:
    CustomTask(type("Mine", (Small,), methods)(), "mine").check()


class Counter(nn.Module):
    """A layer that scales by the number of steps so far, however that is kept."""

    seen: torch.Tensor

    def __init__(self, keep: str) -> None:
        super().__init__()
        self.inner, self.keep, self.steps = nn.Linear(2, 1), keep, 0
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        if self.training and self.keep == "buffer":
            self.seen += 1
        elif self.training and self.keep != "numpy":
            self.steps += 1
        y = self.inner(x)
        if self.keep == "reversal":  # the loss is the same, its gradient isn't
            return y + (0.1 * self.steps * (y - y.detach()))
        factor = {"attribute": self.steps, "numpy": np.random.default_rng().random()}.get(self.keep, 0)
        return y * (1 + 0.1 * float(factor))


def test_a_count_without_effect_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    check(model=lambda _: Counter("count"))
    assert named(capsys.readouterr().err, "model.steps")


@pytest.mark.parametrize("trained", [False, True])
def test_a_trial_leaves_no_trace(trained: bool) -> None:
    """Also in a part that is given each time, as a class of a notebook does: frozen, or refused."""
    part = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).requires_grad_(trained).eval()
    before = {name: value.clone() for name, value in part.state_dict().items()}
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    with pytest.raises(BadInputError) if trained else nullcontext():
        check(model=lambda _: nn.Sequential(part, nn.Linear(2, 1)))
    assert all(torch.equal(before[name], value) for name, value in part.state_dict().items())
    assert all(p.grad is None for p in part.parameters())
    assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads


# A model that isn't new each time: what one run learns, the next one begins with.
NET = nn.Linear(2, 1)
FROZEN = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).requires_grad_(False)
FLAT, ARRAY = torch.zeros(6), np.zeros((1, 2), np.float32)
SAVED = {name: value.clone() for name, value in NET.state_dict().items()}


def with_weight(weight: torch.Tensor, assigned: Any = None) -> nn.Module:
    net = nn.Linear(2, 1)
    net.weight = nn.Parameter(weight)
    net.load_state_dict(assigned or {}, strict=False, assign=True)
    return net


class Averaged(nn.Module):
    """A student, and a teacher that is the average of it, which each forward pass moves."""

    def __init__(self, teacher: nn.Linear, quietly: bool) -> None:
        super().__init__()
        self.student, self.teacher, self.quietly = nn.Linear(2, 1), teacher.requires_grad_(False), quietly

    def forward(self, x: torch.Tensor) -> Any:
        if self.training:
            moved, to = self.teacher.weight, self.student.weight.detach()
            (moved.data if self.quietly else moved).lerp_(to, 0.1)
        return self.student(x) + 0 * self.teacher(x)


SHARED: dict[str, tuple[Callable[[Any], nn.Module], str]] = {
    "itself": (lambda _: NET, "weight, bias"),
    "in a list": (lambda _: nn.Sequential(nn.Sequential(nn.ModuleList([NET])[0])), "0.0.weight"),
    "a view": (lambda _: with_weight(FLAT[2:4].view(1, 2)), "weight"),
    "an array": (lambda _: with_weight(torch.from_numpy(ARRAY)), "weight"),
    "a state that was assigned": (lambda _: with_weight(FLAT[:2].view(1, 2).clone(), SAVED), "weight, bias"),
    "frozen, with statistics": (lambda _: nn.Sequential(FROZEN.train(), nn.Linear(2, 1)), "0.1.running_mean"),
    "an average": (lambda _: Averaged(NET, False), "teacher.weight"),
}


@pytest.mark.parametrize("how", SHARED)
def test_a_model_that_is_not_a_new_one_each_time_is_refused(how: str) -> None:
    """Whole or in part, by whatever way the memory is the same; what is shared stays as it is."""
    make, tensors = SHARED[how]
    kept = copy.deepcopy([NET.state_dict(), FROZEN.state_dict(), FLAT, ARRAY, SAVED])
    NET.requires_grad_(True)
    with pytest.raises(BadInputError, match=re.escape(f" {tensors}")) as refused:
        check(model=make)
    assert "copy.deepcopy" in str(refused.value) and "\n" not in str(refused.value)
    assert str(kept) == str([NET.state_dict(), FROZEN.state_dict(), FLAT, ARRAY, SAVED])


def test_a_trial_draws_no_numbers_that_the_training_would_have_had() -> None:
    np.random.seed(3)
    check(model=lambda _: with_weight(torch.from_numpy(np.random.rand(1, 2).astype(np.float32))))
    drawn = np.random.rand()
    np.random.seed(3)
    assert drawn == np.random.rand()


@pytest.mark.parametrize(
    ("attributes", "lower"),
    [({}, True), ({"metric": "accuracy"}, False), ({"metric": "mae", "mode": "min"}, True)],
)
def test_which_way_a_metric_is_better(attributes: dict[str, Any], lower: bool) -> None:
    assert CustomTask(type("Mine", (Small,), attributes)(), "mine").lower_is_better is lower


def rows(_: Small, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    return {"loss": model(batch["x"])[:, 0], "score": batch["x"][:, 0]}


def counting(num_items: Any) -> dict[str, Any]:
    part = {**Small().data()[0], "num_items": num_items}
    return {"data": lambda _: (part, part), "reduction": "mean"}


def reading(**facts: Any) -> dict[str, Any]:
    """A data set that fills batches itself."""
    kind = dict[str, Any](num_items=1, uniforms=0, arrays=None, in_process=True, fingerprint=lambda _: "")
    kind |= {"__len__": lambda _: 10, "fields": ArrayDataset(Small().data()[0]).fields, **facts}
    return {"data": lambda _: (type("Filled", (), kind)(),) * 2}


def doubled(_: Any) -> Any:
    x = np.arange(20).reshape(10, 2) / 10
    return (part := {"x": x, "y": x[:, :1]}), part


LOADER: Any = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(4, 2)))
AUC = {"metric": "auc", "mode": "max", "measure": rows}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"loss": None}, "loss sample"),
    ({"loss": lambda _, m, b: m(b.fields["y"])}, "RuntimeError"),
    ({"loss": lambda s, *_: s.log("loss", 1)}, "log"),
    ({"loss": lambda _, m, batch: m(next(iter(batch)))}, 'batch["x"] "0"'),
    ({"data": lambda _: ({"x": np.array(["a"])}, {"x": np.zeros(1)})}, "data 'x'"),
    ({"data": lambda _: (LOADER, LOADER)}, "DataLoader loader.dataset"),
    ({"data": doubled}, "x float64 float32 .astype(np.float32"),
    ({"data": doubled, "model": lambda _: nn.Linear(2, 1).bfloat16()}, "x float64 bfloat16 loss"),
    (counting(np.zeros(10, np.int64)), "num_items 0"),
    (counting(np.ones(10)), "data 'num_items'"),
    (reading(read=lambda *_: None, num_items=0), "Filled num_items 0"),
    (reading(read=lambda *_: None, __len__=lambda _: 0), "Filled 0 samples"),
    (reading(read=lambda *_: None, buckets=(1, 2)), "Filled buckets (1, 2)"),
    (reading(read=lambda *_: 1 / 0), "ZeroDivisionError"),
    (reading(read=lambda _s, _n, _r, out: out.update(x=np.ones((4, 2)))), "AttributeError"),  # fills nothing
    ({"model": lambda _: 1 / 0}, "ZeroDivisionError"),
    # State that no checkpoint holds.
    ({"model": lambda _: Counter("buffer")}, "seen persistent=False"),
    ({"model": lambda _: Counter("attribute")}, "model.steps register_buffer"),
    ({"model": lambda _: Counter("reversal")}, "inner.weight"),
    ({"model": lambda _: Counter("numpy")}, "loss numpy's"),
    ({"describe": lambda _: {"classes": {1, 2}}}, "JSON"),
    ({"describe": lambda _: 1 / 0}, "describe ZeroDivisionError"),
    ({"uniforms": -1}, "uniforms -1"),
    ({"uniforms": "2"}, "uniforms '2'"),
    ({"measure": lambda _, __, b: {"a": torch.zeros(len(b.fields["x"]))}}, "loss"),
    ({"measure": lambda *_: {"loss": torch.zeros(3)}}, "loss 3"),
    ({"metric": "mae"}, "min"),
    ({"metric": "mae", "mode": "low"}, "low min max"),
    (AUC | {"summarize": lambda *_: {"f1": 0.5}}, "auc"),
    (AUC | {"summarize": lambda _, rows: {"auc": float(rows["scores"].sum())}}, "KeyError scores"),
]


@pytest.mark.parametrize(("methods", "message"), WRONG)
def test_what_is_wrong_is_said(methods: dict[str, Any], message: str) -> None:
    with refused(message):
        check(**methods)


def test_float64_arrays_go_with_a_float64_model() -> None:
    check(data=doubled, model=lambda _: nn.Linear(2, 1).double())


@pytest.mark.usefixtures("here")
def test_what_has_no_shape_yet_is_refused() -> None:
    with refused("shape"):
        trainer.fit(type("Mine", (Small,), {"model": lambda _: nn.LazyLinear(1)}))


DATA = "class A:\n    def data(self):\n        return [][0]\n    model = loss = measure = data\n"
FILES = [
    ("def x(:\n", "mine.py 1"),
    ("RECIPE = dict(epochs=1)\n", "1 RECIPE"),
    ("RECIPE = {'epochz': 1}\n", "epochz epochs"),
    ("import nothing_like_it\n", "mine.py 1 ModuleNotFoundError nothing_like_it"),
    ("class A:\n    def loss(self): ...\nclass B(A): ...\n", "A B"),
    (DATA, "mine.py: line 3 data IndexError"),
]


@pytest.mark.parametrize(("text", "message"), FILES)
def test_a_file_with_something_wrong(
    text: str, message: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start, "launch", prepare_only)
    (here / "mine.py").write_text(text)
    refusal(main(["train", "mine.py"]), capsys.readouterr().err, message, folder=here / "runs")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "audio", "data": {"name": "coco"}}, "data.name=coco task=audio"),
        ({"task": "language", "model": {"name": "resnet18"}}, "task=language"),
        ({"task": "language", "model": {"width": 64}}, "model.width task=language"),
        ({"task": "audio", "regularization": {"mixup": 0.2}}, "task=audio"),
    ],
)
def test_a_task_goes_with_its_data_and_model(settings: dict[str, Any], message: str) -> None:
    with refused(message):
        validated(Recipe, {"epochs": 1, **settings}, "here")


def test_padding_never_comes_to_the_methods() -> None:
    """Nor does it count: also where a batch is nothing else, and in rows."""
    seen: list[int] = []

    class Counting(Small):
        def loss(self, model: nn.Module, batch: Any) -> Any:
            seen.append(len(batch["x"]))
            return super().loss(model, batch)

        def measure(self, model: nn.Module, batch: Any) -> Any:
            return {"loss": self.loss(model, batch), "first": batch["x"][:, 0]}

        def summarize(self, rows: Any) -> dict[str, float]:
            return {"sum": float(rows["first"].sum())}

    task, model = CustomTask(Counting(), "counting"), nn.Linear(2, 1)
    fields = {"x": torch.arange(8.0).reshape(4, 2), "y": torch.zeros(4, 1)}
    half = Batch(fields, torch.tensor([1.0, 1, 0, 0]), None, 2)
    short = {name: value[:2] for name, value in fields.items()}
    assert torch.equal(task.loss(model, half), task.loss(model, Batch(short, None, None, 2)))
    assert seen == [2, 2] and task.measure(model, half)["first"].tolist() == [0.0, 2.0, 0.0, 0.0]
    assert float(task.loss(model, Batch(fields, torch.zeros(4), None, 0))) == 0


@pytest.mark.parametrize(
    ("name", "meant", "value"),
    [
        ("optimiser", "optimizer", print),
        ("transform", "transforms", print),
        ("collate_fn", "collate", print),
        ("metrics", "metric", 1),
        ("uniform", "uniforms", 1),
    ],
)
def test_a_slip_of_an_optional_name_is_an_error(name: str, meant: str, value: Any) -> None:
    """It would be without effect: nothing looks at it."""
    base = type("Base", (Small,), {name: value})
    with refused(f"{name} {meant}"):
        CustomTask(type("Mine", (base,), {})(), "mine.py")


def test_a_class_that_fit_is_given_has_the_recipe_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_task, "RECIPE", {"epochs": 3}, raising=False)
    assert recipe_of(Small()) == {"epochs": 3, "task": "own"}
    with refused("Small", "RECIPE", "str"), monkeypatch.context() as patch:
        patch.setattr(Small, "RECIPE", "digits", raising=False)
        trainer.fit(Small)
    with refused("Mine TypeError"):
        trainer.fit(type("Mine", (Small,), {"__init__": lambda *_, _given: None}))


@pytest.mark.parametrize(
    ("change", "odd"),
    [
        ("RECIPE |= {'seed': 1}", "seed"),
        ("RECIPE['data']['workers'] = 1", "data"),
        ("del RECIPE['data']", "data"),
        ("RECIPE.update(epochs=4)", "epochs"),
        ("del RECIPE", "epochs data"),
        ("if Mine:\n    RECIPE = {'epochs': 5}", "epochs data"),
        ("from base import *", "epochs data"),
        ("Mine.RECIPE = {'epochs': 5}", "epochs data"),
        ("EPOCHS = RECIPE['epochs'] + len(RECIPE.get('data', {}))", ""),
        ("if __name__ == '__main__':\n    RECIPE['seed'] = 1", ""),
        ("Mine.RECIPE = RECIPE", ""),
    ],
)
def test_a_recipe_that_is_another_once_the_file_was_run_is_refused(
    change: str, odd: str, tmp_path: Path
) -> None:
    (tmp_path / "base.py").write_text("RECIPE = {'epochs': 2}")
    file = tmp_path / "mine.py"
    begin = "RECIPE = {'epochs': 3, 'data': {}}\nclass Mine(Small): ..."
    file.write_text(f"from tests.helpers.small_task import Small\n{begin}\n{change}")
    with refused(file, "RECIPE", odd) if odd else nullcontext():
        custom_task(str(file))


def test_hooks_are_in_the_class_or_beside_it(tmp_path: Path) -> None:
    file, begin = tmp_path / "mine.py", "from tests.helpers.small_task import Small\nclass Mine(Small): ...\n"
    for text, wanted in (("hooks = [1]", [1]), ("Mine.hooks = [2]", [2]), ("hooks = Mine.hooks = [3]", [3])):
        file.write_text(begin + text)
        assert custom_task(str(file)).hooks == wanted
    file.write_text(f"{begin}hooks = [1]\nMine.hooks = [2]")
    with refused(file, "hooks Mine"):
        custom_task(str(file))
