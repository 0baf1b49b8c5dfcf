"""Promise: the commands of each example's README run as they stand, in a copy of its folder."""

import ast
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests.helpers import preloaded
from trainer import PUBLIC

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
# What makes a run of an example small; its own words come first, so these win.
SMALL = {
    "custom-task": ["epochs=1"],
    "fine-tune-images": ["max_steps=2", "data.image_size=32", "evaluation.every=end"],
    "own-text": ["max_steps=2", "language.width=32", "language.layers=1", "data.eval_batch_size=512"],
}


def commands_of(example: str) -> list[list[str]]:
    """The words of each command in the README's blocks of shell."""
    text = (FOLDER / example / "README.md").read_text()
    lines = "".join(re.findall(r"```sh\n(.*?)```", text, re.S)).splitlines()
    return [shlex.split(line, comments=True) for line in lines]


def run_all(example: str, folder: Path) -> str:
    """Runs the README's commands in a copy of the folder; returns what they print."""
    shutil.copytree(FOLDER / example, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "README.md").unlink()  # what runs needs none of it
    said = ""
    for words in commands_of(example):
        program = {"python": [], "trainer": ["-m", "trainer"]}[words[0]]
        small = [f"--set={one}" for one in (*SMALL[example], "parallel.threads=1") if words[1] == "train"]
        done = preloaded.run([sys.executable, *program, *words[1:], *small], cwd=folder)
        assert done.returncode == 0, f"{shlex.join(words)}:\n{done.stdout}{done.stderr}"
        said += done.stdout
    return said


def test_there_are_three() -> None:
    assert set(SMALL) == set(EXAMPLES)


@pytest.mark.parametrize("example", EXAMPLES)
def test_its_modules_import_public_names(example: str) -> None:
    public = {name for names in PUBLIC.values() for name in names}
    for path in (FOLDER / example).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not [one.name for one in node.names if one.name.partition(".")[0] == "trainer"]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "trainer":
                assert node.module == "trainer"
                assert {one.name for one in node.names} <= public


def test_a_text_of_ones_own(tmp_path: Path) -> None:
    said = run_all("own-text", tmp_path / "mine")
    assert "The statement " in said


def test_images_of_ones_own(tmp_path: Path) -> None:
    said = run_all("fine-tune-images", tmp_path / "mine")
    assert re.search(r"pictures/mine/val/8/114\.png +\d +\d", said)


def test_a_custom_task(tmp_path: Path) -> None:
    said = run_all("custom-task", tmp_path / "mine")
    folder = tmp_path / "mine"
    assert (folder / "notes.txt").read_text().startswith("step 32: rmse 0.")
    assert f"is in {folder}/runs/forecast/checkpoints/step-" in said
    assert list((folder / "runs" / "forecast").rglob("model.json"))
