"""Promise: a run folder names no code: tasks, hooks and sinks run only where the command names them."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import command, refuse
from tests.helpers.planted import write
from tests.helpers.refusals import refused
from tests.helpers.run_folders import manifest
from trainer.config.own_code import own_code
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import load_recipe, provisional
from trainer.errors import UnnamedCodeError
from trainer.runs.manifest import RunFolder, read_run
from trainer.tasks.custom import custom_task
from trainer.train.components.task import refuse_other_task
from trainer.train.model_of_run import open_run
from trainer.train.start.from_python import fit

TASK = """
import numpy as np, torch
from torch import nn
import net
class Toy:
    RECIPE = {
        "max_steps": 2, "parallel": {"threads": 1}, "data": {"global_batch_size": 8, "micro_batch_size": 8}
    }
    def data(self):
        one = {"x": np.ones((16, 2), np.float32)}
        return one, one
    def model(self):
        return nn.Linear(2, 1)
    def loss(self, model, batch):
        return net.square(model(batch.fields["x"]))
    def measure(self, model, batch):
        return {"loss": self.loss(model, batch)}
    def inputs(self, batch):
        return batch.fields["x"]
    def predict(self, model, options):
        return 0
"""
NET = "def square(x):\n    return x * x\n"
OTHER = (
    "class Other(Toy):\n    def loss(self, model, batch):\n        return 2 * super().loss(model, batch)\n"
)


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, with a blank in its name: a task's file, a module beside it, a hook, a sink."""
    folder = tmp_path / "my code"
    folder.mkdir()
    monkeypatch.chdir(folder)
    hook = "class Hook:\n    def after_step(self, row):\n        open('hooked', 'w')\n"
    hook += "def sink(row):\n    open('sunk', 'w')\n"
    return write(folder, {"task.py": TASK, "net.py": NET, "own.py": hook, "both.py": TASK + OTHER})


def printed(words: str | Sequence[object], *names: object) -> list[str]:
    """The command in the line of a refusal, without `trainer`."""
    error = refuse(words, *names)
    return shlex.split(error[error.rindex(": trainer ") + 2 :])[1:]


def test_each_command_prints_the_one_that_names_the_code_and_that_one_works(
    code: Path, tmp_path: Path
) -> None:
    run, ran = tmp_path / "run", code / "ran"
    fit("task.py", out=run)
    (code / "task.py").write_text(f"open({str(ran)!r}, 'w')\n{TASK}")
    resumed = ("train max_steps=4 --resume RUN", "train --init-from RUN --out new")
    for words in ("evaluate RUN", "predict RUN", "export RUN --to safetensors", "verify RUN", *resumed):
        given = words.replace("RUN", str(run)).split()
        assert printed(given, run) == [*given, "--task", str(code / "task.py")]
    for name in (["report"], ["runs"], ["runs", "--json"]):
        command(*name, run)
    assert not ran.exists()
    (code / "task.py").write_text(TASK + "# a comment is no other task\n")
    works = printed(["evaluate", run])
    (code / "net.py").write_text(NET.replace("x * x", "3 * x"))
    refuse(works, "function net.square")
    (code / "net.py").write_text(NET)
    command(*works)


def test_a_notebooks_class_goes_on_from_a_file(code: Path) -> None:
    scope: dict[str, Any] = {"__name__": "__main__"}
    (code / "cell.py").write_text(TASK.replace("import net\n", NET).replace("net.", ""))
    exec((code / "cell.py").read_text(), scope)
    fit(scope["Toy"], out="run")
    assert printed("evaluate run", "run") == ["evaluate", "run", "--task", "FILE.py:Toy"]
    (code / "cell.py").write_text((code / "cell.py").read_text() + OTHER)
    fit("cell.py:Toy", {"max_steps": 4}, out="run")
    assert manifest("run")["steps_done"] == 4
    refuse("evaluate run --task cell.py:Other", "method loss")


@pytest.mark.usefixtures("code")
def test_a_class_of_several_is_named() -> None:
    for name in ("both.py", "both.py:Absent", "both.py:"):
        with refused("both.py"):
            custom_task(name)
    fit("both.py:Other", out="run")
    assert open_run(Path("run"), ["task=both.py:Other"]).recipe.task == "both.py:Other"
    with refused("run", "method loss"):
        open_run(Path("run"), ["task=both.py:Toy"])


def test_hooks_and_sinks_of_a_run_are_named_again(code: Path) -> None:
    fit("task.py", {"hooks.use": ["own.py:Hook"], "log.to": ["jsonl", "own.py:sink"]}, out="run")
    for name in ("hooked", "sunk"):
        (code / name).unlink()
    command("evaluate", "run", "--task", "task.py")
    again = "train --resume run max_steps=4"
    assert printed(f"{again} hooks.use=[own.py:Hook]")[-1] == 'log.to=["jsonl", "own.py:sink"]'
    works = printed(again, "run", "hooks.use", "log.to")
    assert not (code / "hooked").exists() and not (code / "sunk").exists()
    command(*works)
    assert (code / "hooked").exists() and (code / "sunk").exists()


def test_what_counts_as_code() -> None:
    def of(**more: object) -> dict[str, object]:
        return own_code(Recipe.model_validate({"epochs": 1, **more}))

    assert of() == of(log={"to": ["jsonl", "tensorboard"]}) == {}
    assert of(task="a/b.py:C") == {"task": "a/b.py:C"}
    assert of(log={"to": ["os:system"]}) == {"log.to": ["os:system"]}  # an installed module, too
    assert of(hooks={"use": ["mine:Hook"]}) == {"hooks.use": ["mine:Hook"]}
    assert of(hooks={"use": ["mine:Hook"], "enabled": False}) == {}


def test_a_recipe_in_a_run_folder_is_its_senders(tmp_path: Path) -> None:
    text = "task: absent.py\nhooks: {use: ['own.py:Hook']}\n"
    write(tmp_path, {"run/config.yaml": text, "mine/config.yaml": text, "run/manifest.json": "{}"})
    (tmp_path / "link.yaml").symlink_to("run/config.yaml")
    for recipe in (str(tmp_path / "run" / "config.yaml"), str(tmp_path / "link.yaml")):
        for name in (["train"], ["check"], ["data", "show"]):
            words = printed([*name, recipe], recipe)
            assert words[-4:] == ["--set", "task=absent.py", "--set", 'hooks.use=["own.py:Hook"]']
        with pytest.raises(UnnamedCodeError):
            load_recipe(recipe, ["hooks={on_error: warn}", "task=mine.py"])
        load_recipe(recipe, ["hooks={use: [own.py:Hook]}", "task=mine.py"])
    assert provisional(str(tmp_path / "mine" / "config.yaml"), [])[0].task == "absent.py"


def test_words_of_a_stranger_are_quoted(tmp_path: Path) -> None:
    for task, shown in {"a'; rm -rf x.py": "a'; rm -rf x.py", "a\x1b[2J.py": "FILE"}.items():
        write(tmp_path, {"manifest.json": "{}", "config.yaml": json.dumps({"task": task})})
        with pytest.raises(UnnamedCodeError) as found:
            load_recipe(str(tmp_path / "config.yaml"), [])
        assert found.value.words == ["--set", f"task={shown}"]


def test_a_file_that_changes_while_it_is_imported_is_refused(code: Path) -> None:
    (code / "task.py").write_text(f"open({str(code / 'net.py')!r}, 'a').write('# more\\n')\n{TASK}")
    with refused("task.py", "net.py"):
        custom_task("task.py")
    (code / "task.py").write_text(TASK)
    assert len(custom_task("task.py").source_hash) == 16


def test_under_another_python_the_files_are_compared(code: Path) -> None:
    """There, the identity's code can't be compared."""
    fit("task.py", out="run")
    stored = read_run(Path("run")).manifest
    assert stored.identity is not None
    older = stored.identity.model_copy(update={"compiler": "older"})
    run = RunFolder(Path("run"), stored.model_copy(update={"identity": older}))
    refuse_other_task(run, custom_task("task.py"))
    (code / "net.py").write_text(NET.replace("x * x", "3 * x"))
    for one in (run, RunFolder(Path("run"), stored.model_copy(update={"identity": None}))):
        with refused("run", "task", stored.fingerprint["task"]):
            refuse_other_task(one, custom_task("task.py"))
