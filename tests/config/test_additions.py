"""Promise: an optimizer, metric, model, tracker, command is one file and one row, by CONTRIBUTING.md."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
WORDS = (ROOT / "CONTRIBUTING.md").read_text()
# Chapter of CONTRIBUTING.md: the file that it names, its text, and the row.
ADDED = {
    "Add an optimizer": (
        "trainer/optim/lion.py",
        """
import torch

class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr, betas):
        super().__init__(params, {"lr": lr, "betas": betas})
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["exp_avg"] = torch.zeros_like(p)
    moments = staticmethod(lambda parameter, group: 1)
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                mean = self.state[p]["exp_avg"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * mean.lerp(p.grad, 1 - first).sign())
                mean.lerp_(p.grad, 1 - second)
""",
        '"lion": Optimizer("trainer.optim.lion:Lion", "signs", ("betas",), elementwise=True),',
    ),
    "Add a schedule": (
        "trainer/optim/root.py",
        "def root(config, after, epoch):\n    return [(1 + n) ** -0.5 for n in range(len(after))]\n",
        '"inverse-sqrt": Schedule("trainer.optim.root:root"),',
    ),
    "Add a metric": ("", "", '"top3": Metric(_within(3), classes=4),'),
    "Add a model": (
        "trainer/models/flat.py",
        """
from torch import nn

def flat(config, channels, classes):
    return nn.Sequential(nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(64 * channels, classes))
""",
        '"flat": Model(("classification",), "trainer.models.flat:flat", "one layer"),',
    ),
    "Add a sink or a tracker": (
        "trainer/runs/tracking/to_lines.py",
        """
from pathlib import Path

class ToLines:
    def open(self, about):
        self.file = Path(about["folder"], "lines.txt").open("a")
        return about["run_id"], "lines.txt"
    def log(self, rows):
        for row in rows:
            print(row["kind"], row["step"], file=self.file, flush=True)
    def close(self, status):
        self.file.close()
""",
        '"lines": SinkKind("trainer.runs.tracking.to_lines:ToLines", "plain lines", tracker=True),',
    ),
    "Add a command": (
        "trainer/commands/hello.py",
        'def add_parser(to):\n    to.add_parser("hello").set_defaults(run=lambda _: print("hello") or 0)\n',
        '"hello": "Train",',
    ),
}
PROGRAM = """
import sys
from trainer.cli import main
from trainer.config.recipe import Recipe
from trainer.config.section import describe

keys = {key.name: key.description for key in describe(Recipe)}
assert "lion (signs)" in keys["optim.name"] and "inverse-sqrt" in keys["optim.schedule"]
assert "lion" in keys["optim.betas"] and "flat (classification, one layer)" in keys["model.name"]
assert "lines (plain lines)" in keys["log.to"]
assert main(["hello"]) == 0
words = ["train", "digits", "optim.name=lion", "optim.schedule=inverse-sqrt", "optim.betas=[0.9, 0.99]"]
words += ["model.name=flat", "log.to=[jsonl, lines]", "parallel.threads=1", "device=cpu", "log.every=1"]
words += ["data.workers=0", "ema.decay=0", "optim.warmup_steps=2", "max_steps=6", "data.limit=64"]
assert main([*words, "--out", "run"]) == 0
"""


@pytest.mark.slow  # among the guards of .ci/run
def test_each_is_one_file_and_one_row(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "trainer", tmp_path / "trainer")
    for chapter, (file, text, row) in ADDED.items():
        (told,) = re.findall(rf"^## {chapter}\n(.*?)^## ", WORDS, re.S | re.M)
        # What the chapter says is all that is done: a file where it says, and a row in its table.
        found = re.search(r"(?:row|name) in `([A-Z]+)`\s+\(`(trainer/[\w/]+\.py)`\)", told)
        assert found is not None, chapter
        table, where = found.groups()
        if file:
            path = Path(file)
            assert f"{path.parent}/" in told, chapter
            (tmp_path / path).write_text(text)
        source = (tmp_path / where).read_text()
        begun = re.search(rf"^{table} = [({{]\n", source, re.M)
        assert begun is not None, (chapter, table)
        (tmp_path / where).write_text(f"{source[: begun.end()]}    {row}\n{source[begun.end() :]}")
    # As a rank of somebody else's launcher: all that it trains is then in one process.
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    how: dict[str, Any] = {"env": {**os.environ, **rank}, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, check=False, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hello" in done.stdout
    evaluated = [json.loads(line) for line in (tmp_path / "run" / "evaluations.jsonl").open()]
    assert evaluated[-1]["accuracy"] <= evaluated[-1]["top3"] <= evaluated[-1]["top5"]
    assert "train 6" in (tmp_path / "run" / "lines.txt").read_text()
    table = json.loads((tmp_path / "run" / "manifest.json").read_text())["model"]["total"]
    assert table["bytes"] == 3 * 4 * table["parameters"], "weights, gradients and one moment"
