"""Promise: `trainer runs` lists what lies there, reads nothing by a link, and names what it can't read."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import command, refuse
from tests.helpers.planted import write
from tests.helpers.refusals import named
from trainer.runs.manifest import FORMAT

TRAIN, EVAL = "metrics.jsonl", "evaluations.jsonl"


def made(root: Path, name: str, days: float, rows: str = "", **facts: Any) -> Path:
    """A run folder that was last written so many days ago."""
    told = {"format": FORMAT, "recipe": "digits", "config": {}, "status": "finished", "steps": 12, **facts}
    folder = write(root / name, {"manifest.json": json.dumps(told), EVAL: rows})
    for file in folder.iterdir():
        os.utime(file, (time.time() - days * 86400 - 5,) * 2)
    return folder


ROWS = "\n".join(
    json.dumps({"kind": "eval", "step": step, "seconds": 1.0, "loss": loss, "accuracy": right})
    for step, loss, right in ((6, 0.5, 0.75), (12, 0.4, 0.625))
)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "runs"
    made(root, "old", 9, ROWS)
    told = {"recipe": "mine", "metric": "far", "lower_is_better": True}
    made(root, "new", 3, ROWS.replace('"accuracy"', '"padding": 1.0, "near": 1.0, "far"'), **told)
    made(tmp_path, "outside", 1)
    (root / "latest").symlink_to("new")
    (root / "elsewhere").symlink_to(tmp_path / "outside")
    (root / "nothing").mkdir()
    (root / "note.txt").write_text("")
    return root


def listed(*words: object) -> list[str]:
    return command("runs", *words).out.splitlines()


def test_the_newest_is_first(runs: Path) -> None:
    heading, *lines = listed()
    assert len(lines) == 2
    assert named(lines[0], "new mine finished 12", "0.625 far 3 d")
    assert named(lines[1], "old digits finished 12", "0.75 accuracy 9 d")
    assert listed(runs) == [heading, *lines]
    one = listed("runs/old")
    assert one == listed("old") and named(one[1], "old digits") and "new" not in "".join(one)


def test_for_programs(runs: Path) -> None:
    shutil.rmtree(runs / "new")
    told = json.loads(command("runs", "--json").out)
    (one,) = told["runs"]
    size, age_s = one.pop("bytes"), one.pop("age_s")
    assert size == sum(file.stat().st_size for file in (runs / "old").iterdir())
    assert 9 * 86400 <= age_s < 9 * 86400 + 600
    named = {"name": "old", "recipe": "digits", "status": "finished", "step": 12, "planned_steps": 12}
    assert one == {**named, "metric": "accuracy", "best": 0.75}
    assert told["unreadable"] == []


def test_what_cannot_be_read_is_a_line(runs: Path) -> None:
    made(runs, "older", 1, format=1)
    (made(runs, "torn", 1) / "manifest.json").write_text("{")
    linked = made(runs, "linked", 1) / "manifest.json"
    linked.unlink()
    linked.symlink_to(runs / "old" / "manifest.json")
    pipe = made(runs, "pipe", 1) / "manifest.json"
    pipe.unlink()
    os.mkfifo(pipe)
    rows = 'what\n{"step": "x", "accuracy": "high"}\n[1]\n'
    odd = made(runs, "odd", 0, rows, status=["\x1b[31m"], steps="y")
    (odd / "metrics.jsonl").write_text('{"step": 40}\n{"st')
    (odd / "evaluations.jsonl").chmod(0o600)
    out, errors = command("runs")
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["odd", "new", "old"]
    assert "\x1b" not in lines[1] and " 40 " in lines[1]
    assert len(errors.splitlines()) == 4
    assert all(errors.count(f"runs/{name}") == 1 for name in ("older", "torn", "linked", "pipe"))
    told = json.loads(command("runs", "--json").out)
    assert {one["name"] for one in told["unreadable"]} == {"older", "torn", "linked", "pipe"}


def test_one_that_goes_on_and_one_that_was_killed(runs: Path) -> None:
    going = made(runs, "going", 0, status="running", steps=None)
    (going / "metrics.jsonl").write_text('{"step": 40}\n{"step": 50}\n{"step": 60')
    (going / ".lock").touch()
    assert ["going", "digits", "killed", "50"] in [line.split()[:4] for line in listed()]
    (going / ".lock").unlink()
    assert ["going", "digits", "running", "50"] in [line.split()[:4] for line in listed()]


@pytest.mark.parametrize("sign", ["\n9 fake", "\u202e", "\x1b]0;title\x07"])
def test_names_that_steer_a_terminal_are_shown_on_their_line(tmp_path: Path, sign: str) -> None:
    good = made(tmp_path / "runs", f"a{sign}b", 1, recipe=f"mine{sign}".encode("utf-8", "replace").decode())
    made(tmp_path / "runs", f"c{sign}d", 1).joinpath("manifest.json").write_text("no JSON")
    none = refuse(["runs", f"{good}-not-there"])
    listed_all, one = command("runs", tmp_path / "runs"), command("runs", good)
    assert [text.count("\n") for text in (*listed_all, *one, none)] == [2, 1, 3, 0, 1]
    assert all(each.isprintable() or each == "\n" for each in "".join([*listed_all, *one, none]))


@pytest.mark.parametrize(
    ("status", "rows", "saved", "step"),
    [
        ("failed", {}, [], 0),
        ("stopped", {TRAIN: [10, 20]}, [(10, "1"), (25, "1")], 25),
        ("stopped", {TRAIN: [20], EVAL: [10]}, [(15, "1")], 20),
        ("running", {EVAL: [30]}, [], 30),
        ("stopped", {TRAIN: [10]}, [(5, "1"), (50, "another run's")], 10),
        ("finished", {"summary.jsonl": [17]}, [], 17),
    ],
)
def test_the_steps_done_are_those_of_the_last_record_or_checkpoint(
    status: str, rows: dict[str, list[int]], saved: list[tuple[int, str]], step: int, tmp_path: Path
) -> None:
    folder = made(tmp_path, "one", 1, status=status, run_id="1", steps=None, planned_steps=60)
    for name, steps in rows.items():
        (folder / name).write_text("".join(json.dumps({"step": step}) + "\n" for step in steps))
    for at, run_id in saved:
        state = json.dumps({"format": 1, "step": at, "state": {"run_id": run_id}})
        write(folder, {f"checkpoints/step-{at:08}/state.json": state})
    (one,) = json.loads(command("runs", tmp_path, "--json").out)["runs"]
    assert (one["step"], one["planned_steps"]) == (step, 60)
