"""Promise: an optimizer, metric, model, tracker, command is one file and one row, by CONTRIBUTING.md."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
WORDS = (ROOT / "CONTRIBUTING.md").read_text()
HELLO = """
def add_parser(commands):
    commands.add_parser("hello").set_defaults(run=lambda options: print("hello") or 0)
"""
# Chapter of CONTRIBUTING.md: the file that it names, its text, and the row.
ADDED = {
    "Add an optimizer": (
        "trainer/optim/lion.py",
        '"lion": Optimizer("trainer.optim.lion:Lion", "signs", ("betas",), elementwise=True),',
    ),
    "Add a schedule": ("trainer/optim/root.py", '"inverse-sqrt": Schedule("trainer.optim.root:root"),'),
    "Add a metric": ("", '"top3": Metric(_within(3), classes=4),'),
    "Add a model": (
        "trainer/models/flat.py",
        '"flat": Model(("classification",), "trainer.models.flat:flat", "one layer"),',
    ),
    "Add a sink or a tracker": (
        "trainer/runs/tracking/to_lines.py",
        '"lines": SinkKind("trainer.runs.tracking.to_lines:ToLines", "plain lines", tracker=True),',
    ),
    "Add a command": ("trainer/commands/hello.py", '"hello": "Train",'),
}
PROGRAM = """
from trainer.cli import main
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import load_recipe
from trainer.config.section import describe

keys = {key.name: key.description for key in describe(Recipe)}
assert "lion (signs)" in keys["optim.name"] and "inverse-sqrt" in keys["optim.schedule"]
assert "lion" in keys["optim.betas"] and "flat (classification, one layer)" in keys["model.name"]
assert "lines (plain lines)" in keys["log.to"]
words = ["optim.name=lion", "optim.schedule=inverse-sqrt", "model.name=flat", "log.to=[jsonl, lines]"]
assert load_recipe("digits", words).optim.name == "lion"
assert main(["hello"]) == 0
"""


def test_each_is_one_file_and_one_row(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "trainer", tmp_path / "trainer")
    for chapter, (file, row) in ADDED.items():
        (told,) = re.findall(rf"^## {chapter}\n(.*?)^## ", WORDS, re.S | re.M)
        # What the chapter says is all that is done: a file where it says, and a row in its table.
        found = re.search(r"(?:row|name) in `([A-Z]+)`\s+\(`(trainer/[\w/]+\.py)`\)", told)
        assert found is not None, chapter
        table, where = found.groups()
        if file:
            assert f"{Path(file).parent}/" in told, chapter
            (tmp_path / file).write_text(HELLO)
        source = (tmp_path / where).read_text()
        begun = re.search(rf"^{table} = [({{]\n", source, re.M)
        assert begun is not None, (chapter, table)
        (tmp_path / where).write_text(f"{source[: begun.end()]}    {row}\n{source[begun.end() :]}")
    said = subprocess.check_output([sys.executable, "-c", PROGRAM], cwd=tmp_path, text=True)
    assert said == "hello\n"
