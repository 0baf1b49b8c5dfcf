"""Promise: Python code that a run folder names runs only if it is this user's own, or with --trust."""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.forked import small
from trainer import cli
from trainer.commands.train import check_code, find_recipe, find_run
from trainer.config.recipe import Recipe
from trainer.errors import BadInputError
from trainer.runs.trust import check_recipe, check_run, key_file, marked, own_code
from trainer.train.start.from_python import fit

TASK = """
import numpy as np, torch
from torch import nn
import net
RECIPE = {"epochs": 1, "parallel": {"threads": 1}, "data": {"global_batch_size": 8, "micro_batch_size": 8}}
class Toy:
    def data(self):
        one = {"x": np.ones((16, 2), np.float32)}
        return one, one
    def model(self):
        return nn.Linear(2, 1)
    def loss(self, model, batch):
        return net.square(model(batch.fields["x"]))
    def measure(self, model, batch):
        return {"loss": self.loss(model, batch)}
"""
NET = "def square(x):\n    return (x * x).sum()\n"
HOOK = "def sink(row):\n    pass\nclass Hook:\n    def after_step(self, row):\n        pass\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration folder of this user's, without a key."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@pytest.fixture
def run(tmp_path: Path, home: Path) -> Path:
    """A run folder that this user began, as far as its manifest says; its code lies in it."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name, text in {"task.py": TASK, "net.py": NET, "own.py": HOOK}.items():
        (folder / name).write_text(text)
    assert not home.exists()
    write(folder, recipe_of(folder))
    return folder


def recipe_of(folder: Path, **more: Any) -> Recipe:
    own = f"{folder}/own.py"
    values = {"task": f"{folder}/task.py", "hooks": {"use": [f"{own}:Hook"]}, "log": {"to": [f"{own}:sink"]}}
    return Recipe.model_validate({"epochs": 1, **values, **more})


def write(folder: Path, recipe: Recipe, run_id: str = "a") -> None:
    facts = {"run_id": run_id, "config": recipe.model_dump(mode="json"), "trust": marked(recipe, run_id, {})}
    (folder / "manifest.json").write_text(json.dumps(facts))


def change(folder: Path, **more: Any) -> None:
    facts = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**facts, **more}))


def asks(folder: Path, recipe: Recipe | None = None, *settings: str) -> str:
    """The line that refuses, or nothing."""
    try:
        check_run(folder, recipe or recipe_of(folder), settings, trusted=False)
    except BadInputError as error:
        assert "\n" not in str(error)
        return str(error)
    return ""


def test_ones_own_run_never_asks_and_a_strangers_does(
    run: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asks(run) == ""
    assert oct(key_file().stat().st_mode)[-3:] == "600"
    assert oct(home.joinpath("trainer").stat().st_mode)[-3:] == "700"
    moved = shutil.copytree(run, run.with_name("moved"))
    assert asks(moved) == ""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home.with_name("other")))
    line = asks(run)
    for word in ("task.py", "own.py:Hook", "own.py:sink", "sha256", "with net.py", "--trust"):
        assert word in line
    check_run(run, recipe_of(run), [], trusted=True)
    marked(recipe_of(run), "b", {})  # this user has a key, and it is another
    assert "no mark of yours" in asks(run)


def a_package(run: Path) -> None:
    (run / "net").mkdir()
    (run / "net" / "__init__.py").write_text(NET)


def a_link(run: Path) -> None:
    (run / "task.py").unlink()
    (run / "evil").write_text("import os\n")
    (run / "task.py").symlink_to(run / "evil")


def a_fifo(_: Path) -> None:
    key_file().unlink()
    os.mkfifo(key_file(), 0o600)


FAULTS: dict[str, Callable[[Path], object]] = {
    "another task": lambda run: (run / "task.py").write_text(TASK + "import os\n"),
    "a module beside it": lambda run: (run / "net.py").write_text(NET + "import os\n"),
    "compiled, which Python prefers": lambda run: (run / "net.abi3.so").write_bytes(b"\x7fELF"),
    "bytecode in its place": lambda run: (run / "net.py").rename(run / "net.pyc"),
    "a package in its place": a_package,
    "shadows an installed package": lambda run: (run / "torch.py").write_text(""),
    "another hook": lambda run: (run / "own.py").write_text(HOOK + "import os\n"),
    "a link to another": a_link,
    "the mark of another run": lambda run: change(run, run_id="b"),
    "no mark": lambda run: change(run, trust={}),
    "a mark without code": lambda run: change(run, trust={"code": [], "marks": ["0" * 64]}),
    "odd marks": lambda run: change(run, trust={"code": ["task"], "marks": [None, {}, "\ud800"]}),
    "no list": lambda run: change(run, trust=7),
    "no manifest": lambda run: (run / "manifest.json").unlink(),
    "a key that others read": lambda _: key_file().chmod(0o644),
    "half a key": lambda _: key_file().write_bytes(b"1"),
    "a FIFO for a key": a_fifo,
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_isnt_proved_is_asked_for(run: Path, name: str) -> None:
    FAULTS[name](run)
    assert "--trust" in asks(run)


def test_another_function_of_the_same_file_is_other_code(run: Path) -> None:
    assert "own.py:os" in asks(run, recipe_of(run, log={"to": [f"{run}/own.py:os"]}))
    assert "own.py:sink" in asks(run, recipe_of(run, hooks={"use": [f"{run}/own.py:sink"]}))
    assert "os:system" in asks(run, recipe_of(run, log={"to": ["os:system"]}))
    assert asks(run, recipe_of(run, log={"to": ["jsonl"]}, hooks={"enabled": False})) == ""


@pytest.mark.usefixtures("home")
def test_a_module_is_found_without_running_its_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "mine" / "deep"
    package.mkdir(parents=True)
    (tmp_path / "mine" / "__init__.py").write_text("raise SystemExit('it was run')\n")
    (package / "hooks.py").write_text("from .other import Hook\n")
    (package / "other.py").write_text(HOOK)
    recipe = Recipe.model_validate({"epochs": 1, "hooks": {"use": ["mine.deep.hooks:Hook"]}})
    write(tmp_path, recipe)
    (code,) = own_code(recipe)
    assert sorted(code.beside) == ["mine/__init__.py", "mine/deep/hooks.py", "mine/deep/other.py"]
    assert asks(tmp_path, recipe) == ""
    (package / "other.py").write_text(HOOK + "import os\n")
    assert "mine.deep.hooks:Hook" in asks(tmp_path, recipe)
    assert "mine" not in sys.modules
    absent = Recipe.model_validate({"epochs": 1, "hooks": {"use": ["absent.hooks:Hook"]}})
    assert "not found" in asks(tmp_path, absent)


def test_what_the_command_line_names_is_the_users(run: Path) -> None:
    change(run, trust={})
    assert "log.to" not in asks(run, None, f"log.to=[{run}/own.py:sink]")
    named = [f"task={run}/task.py", f"hooks.use=[{run}/own.py:Hook]", f"log={{to: [{run}/own.py:sink]}}"]
    assert asks(run, None, *named) == ""
    assert "own.py:sink" in asks(run, None, *named[:2], "log.every=5", "hooks.enabled=true")
    assert "own.py:Hook" in asks(run, None, named[0], named[2], "hooks={on_error: warn}")


def test_a_recipe_in_a_run_folder_is_its_senders(run: Path) -> None:
    change(run, trust={})
    (run / "sub").mkdir()
    for place in (run / "config.yaml", run / "sub" / "more.yml", run.parent / "link.yaml"):
        if place.parent == run.parent:
            place.symlink_to(run / "config.yaml")
        with pytest.raises(BadInputError, match="--set task="):
            check_recipe(str(place), recipe_of(run), [])
    check_recipe(str(run.parent / "mine.yaml"), recipe_of(run), [])
    check_recipe(str(run / "config.yaml"), small(), [])


@pytest.mark.parametrize("key", ["HOME", "not writable", "a file"])
def test_where_no_key_can_be_made_a_line_says_so(
    run: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    if key == "HOME":
        monkeypatch.delenv("XDG_CONFIG_HOME")

        def none() -> Path:
            raise RuntimeError

        monkeypatch.setattr(Path, "home", none)
    else:
        monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "trainer" / "key") if key == "a file" else "/proc")
    assert marked(recipe_of(run), "a", {})["marks"] == []
    said = capsys.readouterr()
    assert len((said.out + said.err).strip().splitlines()) == 1
    assert "--trust" in asks(run)


def test_marks_of_several_homes_stay(run: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    first = marked(recipe_of(run), "a", {})
    assert marked(recipe_of(run), "a", first) == first
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home.with_name("pod")))
    both = marked(recipe_of(run), "a", first)
    assert len(both["marks"]) == 2
    change(run, trust=both)
    assert asks(run) == ""
    (run / "net.py").write_text(NET + "\n")
    assert len(marked(recipe_of(run), "a", both)["marks"]) == 1


def test_every_command_asks_before_it_runs_anything(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sent = tmp_path / "sent"
    fit(run / "task.py", out=sent)
    assert cli.main(["evaluate", str(sent)]) == 0
    (run / "task.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n" + TASK)
    change(sent, trust={}, status="stopped")
    for words in (
        *(["evaluate", "predict", "verify"]),
        *(["export", "--to", "onnx"], ["train", "--resume"], ["train", "--init-from"]),
    ):
        capsys.readouterr()
        given = [words] if isinstance(words, str) else words
        line = [*given, str(sent)] if given[-1] != "onnx" else [given[0], str(sent), *given[1:]]
        assert cli.main(line) == 2
        assert "--trust" in capsys.readouterr().err
    for words in (["train"], ["check"]):
        assert cli.main([*words, str(sent / "config.yaml")]) == 2
        assert "read it, then" in capsys.readouterr().err
    assert cli.main(["report", str(sent)]) == 0
    assert cli.main(["runs", str(sent)]) == 0
    assert not (tmp_path / "ran").exists()


def test_a_requeued_run_whose_command_names_its_recipe_never_asks(run: Path) -> None:
    change(run, trust={})
    for recipe in (str(run / "task.py"), "digits"):
        options = argparse.Namespace(recipe=recipe, resume=str(run), begin_from=None, out=None, values=None)
        options.set, options.trust, options.source, options.named = [], False, None, None
        find_recipe(options, find_run(options))
        check_code(options)
