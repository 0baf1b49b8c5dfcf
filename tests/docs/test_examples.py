"""Promise: the commands of each example's README run as they stand, in a copy of its folder.

Each is some processes that train: one is quick, and `.ci/run` runs them all.
"""

import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests.helpers import preloaded
from tests.helpers.ports import free_port

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
_LINES = (FOLDER / "conversations" / "conversations.jsonl").read_text().splitlines()
_TALKS = [json.loads(line).get("messages", []) for line in _LINES]
# Question and answer by the number of their row, of rows that are no more than that.
TALKS = {number: [one["content"] for one in talk] for number, talk in enumerate(_TALKS) if len(talk) == 2}
# What makes a run of an example small; its own words come first, so these win.
SMALL = {
    "conversations": [f"language.prompts={json.dumps([asked for asked, _ in TALKS.values()])}"],  # as it is
    "custom-task": ["epochs=1"],
    "fine-tune-images": ["max_steps=2", "data.image_size=32", "evaluation.every=end"],
    "links": [],
    "lr-range": ["max_steps=30", "optim.warmup_steps=30", "optim.lr=10"],
    "scripts": ["epochs=1", "data.limit=128"],
    "own-text": ["max_steps=2", "language.width=32", "language.layers=1", "data.eval_batch_size=512"],
    "send-records": [],  # tests/runs/test_trackers.py
    "trl": [],  # tests/oracles/test_libraries.py
}

_PROGRAMS = {"python": [], "trainer": ["-m", "trainer"], "torchrun": ["-m", "torch.distributed.run"]}


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
        program = _PROGRAMS[words[0]]
        small = [f"--set={one}" for one in (*SMALL[example], "parallel.threads=1") if words[1] == "train"]
        environment = {**os.environ, "PET_MASTER_PORT": str(free_port())}
        done = preloaded.run([sys.executable, *program, *words[1:], *small], cwd=folder, env=environment)
        assert done.returncode == 0, f"{shlex.join(words)}:\n{done.stdout}{done.stderr}"
        said += done.stdout
    return said


@pytest.mark.slow
def test_the_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks run in order in an empty folder, and what writes again in the same one."""
    text = (FOLDER.parent / "docs" / "tutorial.md").read_text()
    (recipe,) = re.findall(r"```yaml\n(.*?)```", text, re.S)
    (tmp_path / "mine.yaml").write_text(recipe)
    monkeypatch.setenv("CHECKOUT", str(FOLDER.parent))
    lines = [line for block in re.findall(r"```sh\n(.*?)```", text, re.S) for line in block.splitlines()]
    writes = [line for line in lines if re.match(r"trainer (train .*--out|report|export) ", line)]
    for line in lines + writes:
        words = shlex.split(os.path.expandvars(line))
        if words[0] == "cp":
            shutil.copy(words[1], tmp_path)
            continue
        few = ["max_steps=2", "evaluation.every=end", "parallel.threads=1"]
        small = few if words[1] == "train" else []
        done = preloaded.run([sys.executable, *_PROGRAMS[words[0]], *words[1:], *small], cwd=tmp_path)
        assert done.returncode == 0, f"{line}:\n{done.stdout}{done.stderr}"
    assert {path.name for path in tmp_path.iterdir()} >= {"compared.html", "pictures", "runs"}


def test_each_is_known() -> None:
    assert set(SMALL) == set(EXAMPLES)


# What the commands of an example must print.
PRINTED = {"own-text": "The statement ", "scripts": "accuracy"}
PRINTED["fine-tune-images"] = r"pictures/mine/val/8/114\.png +\d +\d"


@pytest.mark.slow
@pytest.mark.parametrize("example", PRINTED)
def test_what_an_example_prints(example: str, tmp_path: Path) -> None:
    assert re.search(PRINTED[example], run_all(example, tmp_path / "mine"))


@pytest.mark.slow
def test_conversations(tmp_path: Path) -> None:
    """It learns by heart what its README says, letter by letter, and nothing of what is held out."""
    said = run_all("conversations", tmp_path / "mine")
    assert said.count("<|im_end|>⟧") >= 3
    assert said.rstrip().endswith(dict(TALKS.values())["What is a micro-batch?"])
    rows = (tmp_path / "mine" / "runs" / "chat" / "answers.jsonl").read_text().splitlines()
    last = json.loads(rows[-1])
    known = [number for number, (asked, answer) in TALKS.items() if last[f"answer/{asked}"] == answer]
    assert known == [number for number in TALKS if number % 10 != 9]


def test_a_learning_rate_range_test(tmp_path: Path) -> None:
    said = run_all("lr-range", tmp_path / "mine")
    rates = [float(one) for one in re.findall(r"^  lr (\S+)", said, re.M)]
    assert rates == sorted(rates) and rates[0] == pytest.approx(10 / 30, rel=0.01)
    told = r"(diverged at|did not diverge in).*; (suggestion: optim\.lr=|the loss never fell)"
    assert re.search(told, said)


@pytest.mark.slow
def test_the_links_between_ranks(tmp_path: Path) -> None:
    row = r"(\d+) bytes +([\d.]+) us +([\d.]+) GB/s  bus ([\d.]+) GB/s"
    rows = re.findall(row, run_all("links", tmp_path / "mine"))
    assert [int(size) for size, *_ in rows] == [1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 25]
    for size, us, rate, bus in rows:  # of two ranks the bus carries what is reduced
        assert float(rate) == float(bus) == pytest.approx(int(size) / float(us) / 1e3, rel=0.02, abs=1e-3)


@pytest.mark.slow
def test_a_custom_task(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    assert f"is in {folder}/runs/forecast/checkpoints/step-" in run_all("custom-task", folder)
    assert (folder / "notes.txt").read_text().startswith("step 32: rmse 0.")
    assert list((folder / "runs" / "forecast").rglob("model.json"))
