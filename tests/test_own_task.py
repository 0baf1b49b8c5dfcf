"""Promise: one's own task in ten minutes, with all of the trainer behind it; what is wrong in it is said."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import trainer
from tests import forked
from trainer import start
from trainer.cli import main
from trainer.config import read_recipe, validated
from trainer.data.loader import Batch
from trainer.data.workers import check_known_there
from trainer.errors import BadInputError
from trainer.own_file import MODULE
from trainer.recipe import Recipe
from trainer.tasks.example import Spirals
from trainer.tasks.own import OwnTask

WALK = Path(__file__).parents[1] / "docs" / "your-own-task.md"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recipe_of(path: Path, **sections: Any) -> Recipe:
    return validated(Recipe, {**read_recipe(str(path)), **sections}, str(path))


def test_a_new_task_trains_at_once(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "mine.py"]) == 0
    assert "trainer train mine.py" in capfd.readouterr().out
    lines = [line for line in (here / "mine.py").read_text().splitlines() if line.strip()]
    assert len(lines) < 60
    assert main(["train", "mine.py", "--set", "epochs=6", "--out", "run"]) == 0
    accuracy = re.findall(r"accuracy +(\d\.\d+)", capfd.readouterr().out)
    assert float(accuracy[-1]) > 0.9


def test_an_existing_file_stays_as_it_is(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mine.py").write_text("mine = 1\n")
    assert main(["new", "mine.py"]) == 2
    assert "is there already" in capsys.readouterr().err
    assert (here / "mine.py").read_text() == "mine = 1\n"
    assert main(["new", "mine"]) == 2
    assert "name it mine.py" in capsys.readouterr().err


def test_it_resumes_to_the_same_bits(here: Path) -> None:
    main(["new", "mine.py"])
    more = {"epochs": 2, "log": {"every": 5, "sinks": ["jsonl"]}, "parallel": {"threads": 1}}
    recipe = recipe_of(here / "mine.py", **more)
    assert forked.attempt(here / "whole", recipe).code == 0
    assert forked.attempt(here / "cut", recipe, stop_after=17).code == 75
    assert forked.attempt(here / "cut", recipe).code == 0
    whole, cut = ((here / name / "model.safetensors").read_bytes() for name in ("whole", "cut"))
    assert whole == cut


def test_a_changed_file_is_another_task(here: Path) -> None:
    main(["new", "mine.py"])
    recipe = recipe_of(here / "mine.py", epochs=1, log={"sinks": ["jsonl"]}, parallel={"threads": 1})
    assert forked.attempt(here / "run", recipe, stop_after=5).code == 75
    with (here / "mine.py").open("a") as file:
        file.write("# changed\n")
    told = forked.attempt(here / "run", recipe)
    assert told.code == 2
    assert "task: " in told.line


@pytest.mark.compat
@pytest.mark.usefixtures("here")
def test_fit_in_this_process() -> None:
    state = torch.get_rng_state()
    run = trainer.fit(
        Spirals, {"epochs": 3, "optim.lr": 0.01, "data.global_batch": 64, "data.micro_batch": 32}
    )
    assert torch.equal(torch.get_rng_state(), state), "fit leaves the caller's random numbers alone"
    assert run.figures["accuracy"] > 0.7
    assert run.folder.parent.name == "runs"
    assert [row["window"] for row in run.rows()] == sorted(row["window"] for row in run.rows())
    points = torch.from_numpy(Spirals().data()[1]["point"])
    labels = torch.from_numpy(Spirals().data()[1]["label"])
    right = (run.model()(points).argmax(1) == labels).float().mean()
    assert float(right) == pytest.approx(run.figures["accuracy"])


@pytest.mark.usefixtures("here")
def test_fit_goes_on() -> None:
    """Of an interrupted run, with the same `out`, to the same bits."""
    settings = {"epochs": 1, "checkpoint.every": 5, "parallel.threads": 1}
    whole = trainer.fit(Spirals, settings, out="whole")

    class Interrupted(Spirals):
        RECIPE = Spirals.__dict__.get("RECIPE", {})
        left = 12

        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            Interrupted.left -= 1
            if not Interrupted.left:
                raise KeyboardInterrupt
            return super().loss(model, batch)

    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Interrupted, settings, out="cut")
    again = trainer.fit(Interrupted, settings, out="cut")
    assert again.figures == whole.figures
    weights = [(run.folder / "model.safetensors").read_bytes() for run in (whole, again)]
    assert weights[0] == weights[1]


@pytest.mark.usefixtures("here")
def test_fit_with_another_class_does_not_go_on() -> None:
    """As a notebook's cell that was changed and run again."""
    trainer.fit(Small, {"epochs": 1}, out="run")

    class Other(Small):
        pass

    Other.__name__ = "Small"
    with pytest.raises(BadInputError, match="task: "):
        trainer.fit(Other, {"epochs": 1}, out="run")


@pytest.mark.usefixtures("here")
def test_settings_from_python_are_paths_and_numpys_numbers_too() -> None:
    run = trainer.fit(Small, {"optim.lr": np.float64(0.01), "data.cache_limit": None}, out=Path("run"))
    assert run.folder == Path("run")


def test_a_data_set_of_the_file_itself_goes_only_to_forked_workers() -> None:
    inner: Any = OwnTask(Small(), "small").train_data
    of_the_file = type("Mine", (type(inner),), {"__module__": MODULE})({"x": np.zeros((8, 2))})
    check_known_there(of_the_file, "fork")
    check_known_there(inner, "spawn")
    with pytest.raises(BadInputError, match="can't import Mine from a task's file"):
        check_known_there(of_the_file, "forkserver")


class Small:
    """Ten samples of two numbers; what is wrong with it is put in by a test."""

    def data(self) -> Any:
        x = np.arange(20, dtype=np.float32).reshape(10, 2) / 10
        return {"x": x, "y": x[:, :1]}, {"x": x[:5], "y": x[:5, :1]}

    def model(self) -> Any:
        return nn.Linear(2, 1)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return F.mse_loss(model(batch.fields["x"]), batch.fields["y"], reduction="sum")

    def measure(self, model: nn.Module, batch: Any) -> Any:
        return {"loss": self.loss(model, batch)}


def test_a_right_one_passes() -> None:
    OwnTask(Small(), "small").check()


def mean(_: Small, model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch.fields["x"]), batch.fields["y"])


WRONG: list[tuple[str, Callable[..., Any] | None, str]] = [
    ("loss", None, "the method loss is missing; it gives a float tensor of shape ()"),
    ("data", lambda _: 3, "data gave int; it gives the samples to learn from"),
    ("data", lambda _: ({"x": np.zeros(3), "y": np.zeros(2)}, {}), "different lengths"),
    ("data", lambda _: ({"x": np.array(["a"])}, {"x": np.zeros(1)}), "which is no number"),
    ("data", lambda _: ({}, {}), "data gave"),
    ("model", lambda _: 3, "model gave int; it gives a torch.nn.Module"),
    ("model", lambda _: 1 / 0, "in model: ZeroDivisionError: division by zero"),
    ("loss", lambda *_: None, "loss gave nothing; it gives a float tensor of shape ()"),
    ("loss", lambda *_: torch.zeros(4), "loss gave a tensor of shape (4,)"),
    ("loss", lambda *_: torch.zeros(()), "without a gradient"),
    ("loss", mean, 'loss gave a mean (reduction="sum" instead'),
    ("loss", lambda _, m, b: m(b.fields["y"]).sum(), "in loss: RuntimeError"),
    ("measure", lambda *_: 3, "measure gave a int"),
    ("data", lambda _: ({"x": [[1], [2, 3]]}, {}), "in data: ValueError"),
    ("describe", lambda _: {"classes": {1, 2}}, "describe gave what JSON can't hold"),
    (
        "measure",
        lambda *_: {"a": torch.zeros(())},
        "metric is 'loss', which measure doesn't give (it gives a)",
    ),
    ("measure", lambda *_: {"loss": torch.zeros(3)}, "'loss' as a tensor of shape (3,)"),
    ("measure", lambda *_: {"loss": torch.zeros(4)}, "and there is no summarise"),
]


@pytest.mark.parametrize(("method", "instead", "message"), WRONG)
def test_what_is_wrong_is_said(method: str, instead: Callable[..., Any] | None, message: str) -> None:
    wrong = type("Wrong", (Small,), {method: instead})
    with pytest.raises(BadInputError, match=re.escape(message)):
        OwnTask(wrong(), "wrong").check()


FILES = [
    ("def x(:\n", "mine.py line 1: invalid syntax"),
    ("RECIPE = dict(epochs=1)\n", "line 1: RECIPE is read before the file is run"),
    ("RECIPE = 3\n", "RECIPE is a dict such as"),
    ("RECIPE = {'epochz': 1}\n", "unknown key 'epochz'; did you mean 'epochs'?"),
    ("RECIPE = {'model': {'name': 'resnet18'}}\n", "has a model of its own; leave the name out"),
    ("import nothing_like_it\n", "mine.py line 1: ModuleNotFoundError: No module named 'nothing_like_it'"),
    ("x = 1\n", "one class with the methods data, model, loss, measure is wanted; found none"),
    ("class A:\n    def loss(self): ...\nclass B(A): ...\n", "found A, B"),
    ("class A:\n    def loss(self): ...\n    def __init__(self, x): ...\n", "A() raised TypeError"),
    ("class A:\n    def loss(self): ...\n", "the method data is missing"),
    (
        "class A:\n    def data(self):\n        return [][0]\n    model = loss = measure = data\n",
        "line 3, in data",
    ),
]


@pytest.mark.parametrize(("text", "message"), FILES)
def test_a_file_with_something_wrong(
    text: str, message: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def launch(*_: Any, **__: Any) -> int:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(start, "launch", launch)
    (here / "mine.py").write_text(text)
    assert main(["train", "mine.py"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "langage"}, "no such task; did you mean 'language'?"),
        ({"task": "audio", "data": {"name": "coco"}}, "data.name=coco is nothing that task=audio reads"),
        ({"task": "language", "model": {"name": "resnet18"}}, "task=language has a model of its own"),
        (
            {"task": "audio", "regularization": {"mixup": 0.2}},
            "regularization: nothing that task=audio reads",
        ),
        ({"task": "language", "model": {"width": 64}}, "model.width: nothing that task=language reads"),
        ({"task": "audio", "data": {"augment": "flip"}}, "data.augment: nothing that task=audio reads"),
        ({"detection": {"flip": 0.5}}, "detection: nothing that task=classification reads"),
    ],
)
def test_a_task_goes_with_its_data_and_model(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError, match=re.escape(message)):
        validated(Recipe, {"epochs": 1, **settings}, "here")


def test_each_task_has_data_and_a_model_of_its_own() -> None:
    recipe = validated(Recipe, {"epochs": 1, "task": "audio"}, "here")
    assert (recipe.data.name, recipe.model.name) == ("dtmf", "audio_cnn")
    assert validated(Recipe, recipe.model_dump(mode="json"), "again") == recipe


def test_padding_never_comes_to_the_methods() -> None:
    """Nor does it count: also where a batch is nothing else, and in rows."""
    seen: list[int] = []

    class Counting(Small):
        def loss(self, model: nn.Module, batch: Any) -> Any:
            seen.append(len(batch.fields["x"]))
            return super().loss(model, batch)

        def measure(self, model: nn.Module, batch: Any) -> Any:
            return {"loss": self.loss(model, batch), "first": batch.fields["x"][:, 0]}

        def summarise(self, rows: Any) -> dict[str, float]:
            return {"sum": float(rows["first"].sum())}

    task, model = OwnTask(Counting(), "counting"), nn.Linear(2, 1)
    fields = {"x": torch.arange(8.0).reshape(4, 2), "y": torch.zeros(4, 1)}
    half = Batch(fields, torch.tensor([1.0, 1, 0, 0]), None, 2)
    short = {name: value[:2] for name, value in fields.items()}
    assert torch.equal(task.loss(model, half), task.loss(model, Batch(short, None, None, 2)))
    assert seen == [2, 2]
    measured = task.measure(model, half)
    assert measured["first"].tolist() == [0.0, 2.0, 0.0, 0.0]
    nothing = Batch(fields, torch.zeros(4), None, 0)
    assert float(task.loss(model, nothing)) == 0
    assert float(task.measure(model, nothing)["loss"]) == 0


def test_it_can_be_exported_and_shown(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["new", "mine.py"])
    text = (here / "mine.py").read_text()
    lines = (
        "def predict(self, model, options):",
        "    print(model(torch.zeros(1, 2)).shape)",
        "    return 0",
    )
    shows = "\n" + "".join(f"    {line}\n" for line in lines)
    (here / "mine.py").write_text(text + shows)
    trainer.fit("mine.py", {"epochs": 1}, out="run")
    assert main(["predict", "run"]) == 0
    assert "torch.Size([1, 2])" in capsys.readouterr().out
    assert main(["export", "run", "--to", "torchscript", "--out", "exported"]) == 0
    assert list((here / "exported").glob("*.ts"))
    with (here / "mine.py").open("a") as file:
        file.write("# changed\n")
    assert main(["predict", "run"]) == 2
    assert "isn't the file that the run was trained with" in capsys.readouterr().err


def test_the_walk_through(here: Path) -> None:
    """Every Python block of docs/your-own-task.md, one after another, as a reader would type them."""
    blocks = re.findall(r"^```python\n(.*?)^```$", WALK.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    (here / "walk.py").write_text("\n".join(blocks))
    done = subprocess.run([sys.executable, "walk.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
