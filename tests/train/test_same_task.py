"""Promise: a run goes on with the task that it was begun with, and with no other, finished or not."""

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import preloaded
from tests.helpers.refusals import named, refusal, refused
from tests.helpers.run_folders import manifest
from tests.helpers.small_task import SETTINGS
from trainer import StopRun, fit
from trainer.host.latest import MANIFEST

pytestmark = pytest.mark.usefixtures("here")
MORE = {
    **SETTINGS,
    "epochs": 2,
    "data.global_batch_size": 4,
    "data.micro_batch_size": 4,
    "checkpoint.every": 1,
}
CELL = """
import numpy as np
from torch import nn

SCALE = 2
history = []


def helper(x):
    return SCALE * x


class Base:
    def data(self):
        x = np.arange(16, dtype=np.float32).reshape(8, 2)
        return {"x": x}, {"x": x}

    def model(self):
        return nn.Linear(2, 1)

    def measure(self, model, batch):
        return {"loss": self.loss(model, batch)}


class Mine(Base):
    def __init__(self, weight=1):
        self.weight = weight

    def loss(self, model, batch):
        return self.weight * helper(model(batch.fields["x"])).square().sum(1)
"""
_NUMBERS = itertools.count(1)


class Stop:
    """Ends a run on purpose after some steps."""

    def after_step(self, row: dict[str, Any]) -> None:
        if row["step"] >= 3:
            raise StopRun("enough")


def cell(*changes: Sequence[str], text: str = CELL, among: dict[str, Any] | None = None) -> Any:
    """Runs a notebook's cell: its class has no source, and its module is `__main__`."""
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    namespace = {"__name__": "__main__"} if among is None else among
    exec(compile(text, f"/tmp/ipykernel_1/{next(_NUMBERS)}.py", "exec"), namespace)
    return namespace["Mine"]


def stopped(task: Any, out: str = "run") -> None:
    with pytest.raises(StopRun):
        fit(task, MORE, out=out, hooks=[Stop])


EDITS = {
    "loss": ("square()", "abs()"),
    "model": ("nn.Linear(2, 1)", "nn.Linear(2, 1, bias=False)"),
    "helper": ("return SCALE * x", "return SCALE + x"),
    "SCALE 2 3": ("SCALE = 2", "SCALE = 3"),
    "weight 1 3": ("weight=1", "weight=3"),
}


def test_an_edited_cell_is_another_task() -> None:
    """Of a stopped run and of a finished one; a comment is no edit."""
    stopped(cell())
    for status in ("stopped", "finished"):
        before = Path("run", MANIFEST).read_bytes()
        for name, change in EDITS.items():
            with refused(name):
                fit(cell(change), MORE, out="run")
            assert Path("run", MANIFEST).read_bytes() == before
        assert manifest("run")["status"] == status
        fit(cell(("class Base:", "# A comment.\n\nclass Base:")), MORE, out="run")


def test_what_a_run_changes_itself_is_no_edit() -> None:
    """A counter of the object and one of the class, and a list of the notebook, which is there still."""
    counts = """
        self.calls = getattr(self, "calls", 0) + 1
        type(self).total += 1
        history.append(self.calls)
        return self.weight"""
    text = CELL.replace("\n        return self.weight", counts)
    text = text.replace("class Mine(Base):\n", "class Mine(Base):\n    total = 0\n")
    notebook: dict[str, Any] = {"__name__": "__main__"}
    own = cell(text=text, among=notebook)(1)
    stopped(own)
    assert own.calls
    stopped(own, "another")
    fit(own, MORE, out="run")
    # The cell of the class is run again, that of the list isn't.
    again = cell(("history = []\n", ""), text=text, among=notebook)
    fit(again(1), MORE, out="another")
    own.weight = 4
    with refused("weight 1 4"):
        fit(own, MORE, out="run")


def test_values_that_are_new_each_time_are_not_compared() -> None:
    more = "self.at = time.time_ns(); self.net = nn.Linear(2, 1)"
    new = ("self.weight = weight", f"self.weight = weight; {more}")
    kind = cell(("import numpy as np", "import time, numpy as np"), new)
    stopped(kind)
    torch.manual_seed(7)  # from which the object's net is drawn
    fit(kind, MORE, out="run")
    assert any(named(note, "at net") for note in manifest("run")["notes"])
    with refused("weight 1 3"):
        fit(kind(3), MORE, out="run")


def test_what_no_code_shows_is_seen_by_the_trial() -> None:
    """Initial weights that come from a file."""
    loads = ("return nn.Linear(2, 1)", "net = nn.Linear(2, 1); net.weight.data *= float(open('w').read())")
    kind = cell((loads[0], f"{loads[1]}; return net"))
    Path("w").write_text("1")
    stopped(kind)
    Path("w").write_text("2")
    with refused("first loss initial weights"):
        fit(kind, MORE, out="run")
    facts = manifest("run")
    facts["identity"]["tried"]["environment"] = "another machine"
    Path("run", MANIFEST).write_text(json.dumps(facts))
    fit(kind, MORE, out="run")


def train(*words: str) -> Any:
    return preloaded.run([sys.executable, "-m", "trainer", "train", "mine.py", "--out", "run", *words])


def test_a_file_and_the_modules_beside_it(here: Path) -> None:
    helpers = "import time\nAT = time.time_ns()\ndef scaled(x): return x * 2, AT\n"
    (here / "helpers.py").write_text(helpers)
    held = "held = open(__file__)\n"  # so that a rank is no fork of the launcher, which tries the task
    text = f"{held}from helpers import scaled\n{CELL}"
    (here / "mine.py").write_text(text.replace("return SCALE * x", "return scaled(x)[0]"))
    settings = [f"{key}={json.dumps(value)}" for key, value in MORE.items()]
    assert train(*settings, "--stop-after", "2").returncode == 75
    assert manifest("run")["identity"]["tried"].keys() == {"environment", "first loss", "initial weights"}
    (here / "helpers.py").write_text(helpers.replace("x * 2", "x * 3"))
    done = train(*settings)
    refusal(done.returncode, done.stderr, "scaled")
    (here / "helpers.py").write_text(f"# A comment.\n{helpers}")
    done = train(*settings)
    assert done.returncode == 0, done.stderr
