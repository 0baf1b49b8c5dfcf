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
from trainer import StopRun, fit
from trainer.errors import BadInputError
from trainer.host.latest import MANIFEST

SETTINGS = {
    "epochs": 2,
    "data.global_batch_size": 4,
    "data.micro_batch_size": 4,
    "log.to": ["jsonl"],
    "log.every": 1,
    "parallel.threads": 1,
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


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
        fit(task, SETTINGS, out=out, hooks=[Stop])


def facts(out: str = "run") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(out) / MANIFEST).read_text())
    return found


def change_facts(out: str = "run", **changes: Any) -> None:
    (Path(out) / MANIFEST).write_text(json.dumps({**facts(out), **changes}))


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (("square()", "abs()"), "method loss"),
        (("nn.Linear(2, 1)", "nn.Linear(2, 1, bias=False)"), "method model"),
        (("return SCALE * x", "return SCALE + x"), "function helper"),
        (("SCALE = 2", "SCALE = 3"), "global SCALE: 2, now 3"),
        (("weight=1", "weight=3"), "attribute weight: 1, now 3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.usefixtures("here")
def test_an_edited_cell_is_another_task(change: tuple[str, str], name: str, finished: bool) -> None:
    if finished:
        fit(cell(), SETTINGS, out="run")
    else:
        stopped(cell())
    before = (Path("run") / MANIFEST).read_bytes()
    with pytest.raises(BadInputError) as refused:
        fit(cell(change), SETTINGS, out="run")
    assert name in str(refused.value)
    assert (Path("run") / MANIFEST).read_bytes() == before
    fit(cell(("class Base:", "# A comment.\n\nclass Base:")), SETTINGS, out="run")
    assert facts()["status"] == "finished"


@pytest.mark.usefixtures("here")
def test_arguments_of_a_sweep() -> None:
    kind = cell()
    stopped(kind(1))
    with pytest.raises(BadInputError, match="attribute weight: 1, now 3"):
        fit(kind(3), SETTINGS, out="run")
    fit(kind(1), SETTINGS, out="run")
    with pytest.raises(BadInputError, match="attribute weight: 1, now 3"):
        fit(kind(3), SETTINGS, out="run")
    fit(kind(3), SETTINGS, out="run", resume="force")


@pytest.mark.usefixtures("here")
def test_what_a_run_changes_itself_is_no_edit() -> None:
    """A counter of the object and one of the class, and a list of the notebook, which is there still."""
    counts = """
        self.calls = getattr(self, "calls", 0) + 1
        type(self).total += 1
        history.append(self.calls)
        return self.weight"""
    text = CELL.replace("\n        return self.weight", counts).replace(
        "class Mine(Base):\n", "class Mine(Base):\n    total = 0\n"
    )
    notebook: dict[str, Any] = {"__name__": "__main__"}
    own = cell(text=text, among=notebook)(1)
    stopped(own)
    assert own.calls
    stopped(own, "another")
    fit(own, SETTINGS, out="run")
    # The cell of the class is run again, that of the list isn't.
    again = cell(("history = []\n", ""), text=text, among=notebook)
    fit(again(1), SETTINGS, out="another")
    own.weight = 4
    with pytest.raises(BadInputError, match="attribute weight: 1, now 4"):
        fit(own, SETTINGS, out="run")


@pytest.mark.usefixtures("here")
def test_values_that_are_new_each_time_are_not_compared() -> None:
    more = "self.at = time.time_ns(); self.net = nn.Linear(2, 1)"
    new = ("self.weight = weight", f"self.weight = weight; {more}")
    kind = cell(("import numpy as np", "import time, numpy as np"), new)
    stopped(kind)
    torch.manual_seed(7)  # from which the object's net is drawn
    fit(kind, SETTINGS, out="run")
    assert any("attribute at" in note and "attribute net" in note for note in facts()["notes"])
    with pytest.raises(BadInputError, match="attribute weight: 1, now 3"):
        fit(kind(3), SETTINGS, out="run")


@pytest.mark.usefixtures("here")
def test_what_cannot_be_compared_is_named_once() -> None:
    kept = ("self.weight = weight", "self.weight = weight; self.lock = threading.Lock()")
    kind = cell(("import numpy as np", "import threading, numpy as np"), kept)
    stopped(kind)
    assert [note for note in facts()["notes"] if "attribute lock" in note]
    fit(kind, SETTINGS, out="run")
    assert not [note for note in facts()["notes"] if "attribute lock" in note]


@pytest.mark.usefixtures("here")
def test_what_no_code_shows_is_seen_by_the_trial() -> None:
    """Initial weights that come from a file."""
    loads = ("return nn.Linear(2, 1)", "net = nn.Linear(2, 1); net.weight.data *= float(open('w').read())")
    kind = cell((loads[0], f"{loads[1]}; return net"))
    Path("w").write_text("1")
    stopped(kind)
    Path("w").write_text("2")
    with pytest.raises(BadInputError, match=r"first loss: .*initial weights: "):
        fit(kind, SETTINGS, out="run")
    identity = facts()["identity"]
    change_facts(identity={**identity, "tried": {**identity["tried"], "environment": "another machine"}})
    fit(kind, SETTINGS, out="run")


@pytest.mark.usefixtures("here")
def test_another_version_of_python_compares_values_alone() -> None:
    stopped(cell())
    change_facts(identity={**facts()["identity"], "compiler": "cpython 3.1"})
    with pytest.raises(BadInputError, match="global SCALE"):
        fit(cell(("SCALE = 2", "SCALE = 3")), SETTINGS, out="run")
    fit(cell(("square()", "square().mul(1)")), SETTINGS, out="run")
    assert [note for note in facts()["notes"] if "cpython 3.1," in note]
    assert facts()["identity"]["compiler"] != "cpython 3.1"


@pytest.mark.parametrize("known", ["0123456789abcdef", None])
@pytest.mark.usefixtures("here")
def test_a_run_from_before_goes_on_with_a_line(known: str | None) -> None:
    """It has the hash of the class's source, or nothing where there was none."""
    stopped(cell())
    before = facts()
    fingerprint = {**({"task": known} if known else {}), **before["fingerprint"]}
    del before["identity"]
    (Path("run") / MANIFEST).write_text(json.dumps({**before, "fingerprint": fingerprint}))
    fit(cell(), SETTINGS, out="run")
    assert [note for note in facts()["notes"] if "earlier version" in note]
    assert facts()["identity"]


def train(*words: str) -> Any:
    return preloaded.run([sys.executable, "-m", "trainer", "train", *words])


def test_a_file_and_the_modules_beside_it(here: Path) -> None:
    (here / "helpers.py").write_text("import time\nAT = time.time_ns()\ndef scaled(x): return x * 2, AT\n")
    held = "held = open(__file__)\n"  # so that a rank is no fork of the launcher, which tries the task
    text = f"{held}from helpers import scaled\nimport torch\ntorch.set_grad_enabled(True)\n{CELL}".replace(
        "return SCALE * x", "return scaled(x)[0]"
    )
    (here / "mine.py").write_text(text)
    settings = [f"{key}={json.dumps(value)}" for key, value in SETTINGS.items()]
    words = ["mine.py", *settings, "--out", "run"]
    assert train(*words, "--stop-after", "2").returncode == 75
    assert facts()["identity"]["tried"].keys() == {"environment", "first loss", "initial weights"}
    edits = {
        "helpers.py": ("x * 2", "x * 3", "function scaled"),
        "mine.py": ("torch.set_grad_enabled(True)", "torch.manual_seed(1)", "statements of the file"),
    }

    def refused() -> None:
        for file, (old, new, name) in edits.items():
            before = (here / file).read_text()
            assert old in before
            (here / file).write_text(before.replace(old, new))
            done = train(*words)
            assert done.returncode == 2, done.stdout + done.stderr
            assert name in done.stderr
            (here / file).write_text(before)

    refused()
    (here / "helpers.py").write_text("# A comment.\n" + (here / "helpers.py").read_text())
    done = train(*words)
    assert done.returncode == 0, done.stderr
    refused()
    assert train(*words).returncode == 0
    verify = [sys.executable, "-m", "trainer", "verify", "run", "--task", "mine.py"]
    verified = preloaded.run(verify)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    (here / "helpers.py").write_text((here / "helpers.py").read_text().replace("x * 2", "x * 3"))
    assert preloaded.run(verify).returncode == 2
