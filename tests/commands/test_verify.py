"""Promise: a run is proved to the bit by training it again, or the first that differs is named."""

import argparse
import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.helpers import preloaded
from tests.helpers.files import contents
from tests.helpers.forked import attempt, small
from tests.helpers.refusals import named
from trainer.cli import main
from trainer.commands.verify import replay as replaying
from trainer.commands.verify.recorded import Segment, last_step, parts_of, read_recorded
from trainer.commands.verify.verdict import _tensors_that_differ, differences_here
from trainer.config.recipe_file import load_recipe


def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Changes a run's manifest."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    edit(manifest)
    path.write_text(json.dumps(manifest))


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stopped after step 5, gone on with, stopped after 11: neither has a row of metrics."""
    folder = tmp_path_factory.mktemp("runs") / "cut"
    assert attempt(folder, stop_after=5).code == 75
    assert attempt(folder, stop_after=11).code == 75
    return folder


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> list[argparse.Namespace]:
    """Replays in a fork instead of a launch; what was asked for."""
    asked = list[argparse.Namespace]()

    def start(request: argparse.Namespace, *_: Any) -> int:
        asked.append(request)
        recipe = load_recipe(request.recipe, request.set)
        return attempt(request.out, recipe, request.resume, stop_after=request.stop_after).code

    monkeypatch.setattr(replaying, "start", start)
    return asked


def verify(folder: Path, *words: str, code: int, capsys: pytest.CaptureFixture[str]) -> str:
    before = contents(folder)
    capsys.readouterr()
    assert main(["verify", str(folder), *words]) == code
    assert contents(folder) == before, "nothing in it is changed"
    told = capsys.readouterr()
    assert told.err == "" if code != 2 else (told.out, told.err.count("\n")) == ("", 1)
    return told.out + told.err


Forked = list[argparse.Namespace]
Capsys = pytest.CaptureFixture[str]


@pytest.mark.usefixtures("forked")
def test_an_identical_run(whole: Path, capsys: Capsys) -> None:
    told = verify(whole, code=0, capsys=capsys)
    # A row: epoch, loss, rate, gradient norm, applied; with every evaluation loss, accuracy and epoch.
    assert named(told, f"{whole} 16 1 10 46")
    names = list(safetensors.torch.load_file(whole / "model.safetensors"))
    assert f"{8 * len(names)} fingerprints of {len(names)} tensors\n" in told
    assert told.endswith("  final weights: model.safetensors, ema.safetensors\n")


def test_some_steps_of_the_whole_schedule(whole: Path, forked: Forked, capsys: Capsys) -> None:
    told = verify(whole, "--steps", "7", code=0, capsys=capsys)
    assert "identical\n  6 of 16 steps" in told and "3 records" in told and "final" not in told
    assert [request.stop_after for request in forked] == [6]
    for steps in ("0", "1", "17", "-3"):
        told = verify(whole, "--steps", steps, code=2, capsys=capsys)
        assert named(told, f"--steps {steps} 2 16")


def test_a_run_that_was_cut_and_is_not_at_its_end(cut: Path, forked: Forked, capsys: Capsys) -> None:
    told = verify(cut, code=0, capsys=capsys)
    assert "identical\n  10 of 16 steps on 1 rank of 1 thread: 6 records" in told
    assert len(forked) == 1, "it was trained in one way throughout"


def test_rows_that_were_lost_are_cut_back(tmp_path: Path, whole: Path) -> None:
    folder = tmp_path / "run"
    assert attempt(folder, stop_after=5).code == 75
    late = attempt(folder, stop_after=5)
    assert late.code == 2 and "is of step 5 already; give a later one" in late.line
    with (folder / "checksums.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 6, "loss": 9.0, "tensors": []}\n{"kind": ')
    assert attempt(folder).code == 0
    assert (folder / "checksums.jsonl").read_text() == (whole / "checksums.jsonl").read_text()


def flip(folder: Path, step: int, tensor: str) -> None:
    """Flips a bit of what was recorded."""
    lines = [json.loads(line) for line in (folder / "checksums.jsonl").read_text().splitlines()]
    place = lines[0]["tensors"].index(tensor)
    for line in lines[1:]:
        if line["step"] == step and line["kind"] == "train":
            line["tensors"][place] = f"{int(line['tensors'][place], 16) ^ 1 << 40:016x}"
    (folder / "checksums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.usefixtures("forked")
def test_a_flipped_bit_is_named(tmp_path: Path, whole: Path, capsys: Capsys) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    flip(folder, 10, "blocks.1.conv1.weight")
    flip(folder, 12, "stem.weight")
    told = verify(folder, code=1, capsys=capsys)
    assert named(told, f"{folder} 10 blocks.1.conv1.weight 1")
    assert "  it began in one of the steps 9 to 10: recorded every 2 steps\n" in told
    assert named(told, "environment")
    verify(folder, "--steps", "9", code=0, capsys=capsys)


@pytest.mark.usefixtures("forked")
def test_changed_weights_are_named(tmp_path: Path, whole: Path, capsys: Capsys) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    file = folder / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    weights["stem.weight"].view(-1)[0] *= -1
    safetensors.torch.save_file(weights, file)
    assert named(verify(folder, code=1, capsys=capsys), f"{file}")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    change(folder, lambda manifest: manifest["weights"].update({"model.safetensors": digest}))
    told = verify(folder, code=1, capsys=capsys)
    assert "  final weights: model.safetensors: stem.weight (1 of " in told and "first at" not in told


@pytest.mark.usefixtures("forked")
def test_a_changed_configuration_is_named(tmp_path: Path, whole: Path, capsys: Capsys) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")

    def edit(manifest: dict[str, Any]) -> None:
        manifest["config"]["optim"]["lr"] *= 1.5
        manifest["versions"]["torch"] = "2.1.0"
        manifest["device"]["cpu_capability"] = "MMX"
        del manifest["versions"]["numpy"]

    change(folder, edit)
    told = verify(folder, code=1, capsys=capsys)
    assert "  first at step 2: stem.weight, " in told and "; lr " in told
    assert "  it began in one of the steps 1 to 2: recorded every 2 steps\n" in told
    assert named(told, "manifest.json")
    assert "\n  config.yaml isn't the config in manifest.json\n" in told
    assert named(told, f"versions.torch 2.1.0 {torch.__version__} device.cpu_capability MMX")
    assert "numpy" not in told


@pytest.mark.usefixtures("forked")
def test_an_environment_that_differs_is_told_with_the_same_bits(
    tmp_path: Path, whole: Path, capsys: Capsys
) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    change(folder, lambda manifest: manifest.update(lock="11aa", image="sha256:22"))
    told = verify(folder, "--steps", "2", code=0, capsys=capsys)
    assert named(told, "11aa")
    assert "    image: sha256:22, now null\n" in told


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda m: m.pop("attempts"), "manifest"),
        (lambda m: m.update(weights=3), "manifest"),
        (lambda m: m["config"].update(lrr=1), "lrr"),
        (lambda m: m["config"]["data"].update(name="folder", path="/nowhere"), "/nowhere"),
        (
            lambda m: m["fingerprint"].update({"training data": "x"}),
            "training",
        ),
        (
            lambda m: m["config"]["data"].update(path="https://***@h/x"),
            "data.path",
        ),
        (
            lambda m: m["attempts"].append(
                m["attempts"][0] | {"step": 9, "changed": ["optim.lr: 1, now 2", "training data: 1, now 2"]}
            ),
            "9 1 2",
        ),
    ],
)
def test_what_cannot_be_replayed_is_one_line(
    tmp_path: Path, whole: Path, capsys: Capsys, edit: Callable[[dict[str, Any]], object], says: str
) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    change(folder, edit)
    assert named(verify(folder, code=2, capsys=capsys), says)


def test_nothing_recorded_is_not_identical(tmp_path: Path, whole: Path, capsys: Capsys) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    for text in (None, "", (whole / "checksums.jsonl").read_text().splitlines()[0] + "\n", "x\ny\n"):
        (folder / "checksums.jsonl").unlink(missing_ok=True)
        if text is not None:
            (folder / "checksums.jsonl").write_text(text)
        assert "nothing was recorded to compare with" in verify(folder, code=2, capsys=capsys)
    (folder / "manifest.json").unlink()
    assert named(verify(folder, code=2, capsys=capsys), "manifest.json")


@pytest.mark.usefixtures("forked")
def test_only_what_changes_no_bit_may_be_set(whole: Path, capsys: Capsys) -> None:
    for setting in ("optim.lr=1", "log.every=3", "seed=1", "data.global_batch_size=4"):
        told = verify(whole, "--set", setting, code=2, capsys=capsys)
        assert named(told, f"--set {setting}")
    verify(whole, "--steps", "2", "--set", "data.prefetch=3", code=0, capsys=capsys)


def test_a_replay_that_is_stopped_proves_nothing(
    whole: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    """By a signal it ends with the code that a part of a replay ends with."""

    def start(request: argparse.Namespace, *_: Any) -> int:
        recipe = load_recipe(request.recipe, request.set)
        return attempt(request.out, recipe, request.resume, stop_at=3).code

    monkeypatch.setattr(replaying, "start", start)
    for words in ([], ["--steps", "6"]):
        assert main(["verify", str(whole), *words]) == 1
        told = capsys.readouterr()
        assert "nothing is proved" in told.err and "identical" not in told.out
    for code in (1, 2, 76):
        monkeypatch.setattr(replaying, "start", lambda *_, code=code: code)
        assert main(["verify", str(whole)]) == code


def rows(name: str, edit: Callable[[list[dict[str, Any]]], object]) -> Callable[[Path], object]:
    """Edits the rows of a file."""

    def change_rows(folder: Path) -> None:
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        edit(lines)
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    return change_rows


def of_kind(kind: str, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["kind"] == kind]


METRICS, TRACE = "metrics.jsonl", "checksums.jsonl"


@pytest.mark.usefixtures("forked")
def test_an_extended_run_is_replayed_as_it_was_trained(tmp_path: Path, capsys: Capsys) -> None:
    """Up to the old end by the old configuration, with its schedule and its evaluation; extended twice."""
    folder = tmp_path / "run"
    assert attempt(folder, small(max_steps=6)).code == 0
    assert attempt(folder, small(max_steps=9, optim={"lr": 0.002}), "force").code == 0
    assert attempt(folder, small(max_steps=12, optim={"lr": 0.002}), "force", stop_after=11).code == 75
    told = verify(folder, code=0, capsys=capsys)
    assert "identical\n  10 of 12 steps on 1 rank of 1 thread, then 1 rank" in told
    assert "identical\n  6 of 12 steps" in verify(folder, "--steps", "6", code=0, capsys=capsys)
    changed = [one["changed"] for one in json.loads((folder / "manifest.json").read_text())["attempts"]]
    assert changed[1] == ["max_steps: 6, now 9", "optim.lr: 0.001, now 0.002"]
    change(folder, lambda m: m["attempts"][1]["changed"].pop())
    assert "first at step 2: " in verify(folder, "--steps", "6", code=1, capsys=capsys)


@pytest.mark.usefixtures("forked")
def test_a_run_that_draws_its_samples_is_replayed(tmp_path: Path, capsys: Capsys) -> None:
    recipe = small(max_steps=4, data={"class_weights": "balanced"})
    assert attempt(tmp_path / "run", recipe).code == 0
    assert "identical\n  4 of 4 steps" in verify(tmp_path / "run", code=0, capsys=capsys)


@pytest.mark.usefixtures("forked")
def test_what_was_logged_elsewhere_for_a_while_is_no_difference(tmp_path: Path, capsys: Capsys) -> None:
    """log.* may change where a run goes on."""
    folder = tmp_path / "run"
    assert attempt(folder, small(log={"to": ["csv"]}), stop_after=5).code == 75
    assert attempt(folder, small(log={"fingerprints": False}), stop_after=9).code == 75
    verify(folder, code=0, capsys=capsys)
    assert attempt(folder, small(log={"every": 7})).code == 0
    told = verify(folder, code=0, capsys=capsys)
    assert "16 of 16 steps" in told and "5 records" in told
    rows(METRICS, lambda lines: lines.remove(of_kind("train", lines)[-1]))(folder)
    assert "row of train metrics of step 16 is missing" in verify(folder, code=1, capsys=capsys)


@pytest.mark.usefixtures("forked")
def test_weights_that_are_none_are_a_difference(tmp_path: Path, whole: Path, capsys: Capsys) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    (folder / "model.safetensors").write_bytes(b"x")
    digest = hashlib.sha256(b"x").hexdigest()
    change(folder, lambda m: m["weights"].update({"model.safetensors": digest}))
    assert "model.safetensors: it can't be read" in verify(folder, code=1, capsys=capsys)


def test_weights_whose_tensors_are_the_same_or_that_are_missing_are_told_apart(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "run.safetensors", tmp_path / "again.safetensors"
    safetensors.torch.save_file({"a": torch.zeros(2)}, ours, {"by": "somebody"})
    safetensors.torch.save_file({"a": torch.zeros(2)}, theirs)
    assert named(_tensors_that_differ(ours, theirs), "tensors identical")
    other = tmp_path / os.fsdecode(b"\xff.safetensors")  # safetensors' own reader takes UTF-8 alone
    ours.rename(other)
    assert _tensors_that_differ(other, theirs).startswith("all tensors are identical")
    other.rename(ours)
    theirs.unlink()
    assert _tensors_that_differ(ours, theirs) == "the replay has none"
    ours.unlink()
    assert _tensors_that_differ(ours, theirs) == "the run has none"


def test_a_stopped_run_that_lacks_its_last_rows_is_replayed_up_to_its_checkpoint(
    tmp_path: Path, cut: Path
) -> None:
    folder = shutil.copytree(cut, tmp_path / "run")
    rows(TRACE, lambda lines: lines.__delitem__(slice(-2, None)))(folder)
    run = read_recorded(folder)
    assert max(row.step for row in run.rows) < 10 == last_step(run, None)


def parts(folder: Path, until: int, *attempts: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    run = read_recorded(folder)
    one = run.manifest.attempts[0]
    made = [one.model_copy(update={"step": w, "ranks": r, "log_every": e}) for w, r, e in attempts]
    changed = dataclasses.replace(run, manifest=run.manifest.model_copy(update={"attempts": made}))
    return [(part.until, part.ranks, part.every) for part in parts_of(changed, until, None)]


def test_a_run_is_replayed_on_the_ranks_that_trained_it(whole: Path) -> None:
    assert parts(whole, 16, (0, 1, 2)) == [(16, 1, 2)]
    assert parts(whole, 16, (0, 1, 2), (5, 1, 2)) == [(16, 1, 2)]
    assert parts(whole, 16, (0, 4, 2), (5, 2, 2), (11, 2, 2), (12, 1, 3)) == [
        (5, 4, 2),
        (12, 2, 2),
        (16, 1, 3),
    ]
    assert parts(whole, 10, (0, 4, 2), (5, 2, 2), (12, 1, 2)) == [(5, 4, 2), (10, 2, 2)]
    assert parts(whole, 4, (0, 4, 2), (5, 2, 2)) == [(4, 4, 2)]
    # The attempt from 5 on left no checkpoint; the one before it began again.
    assert parts(whole, 16, (0, 4, 2), (0, 2, 2), (5, 1, 2), (5, 8, 2)) == [(5, 2, 2), (16, 8, 2)]
    assert parts_of(read_recorded(whole), 8, 3) == [Segment(8, 3, 1, 2)]


def test_an_older_field_is_no_difference() -> None:
    manifest: dict[str, Any] = {"config": {}, "config_hash": hashlib.sha256(b"{}").hexdigest()}
    assert differences_here(manifest, {**manifest, "lock": "1", "versions": {"torch": "2"}}) == []
    assert differences_here({**manifest, "lock": None}, {**manifest, "lock": "1"}) == ["lock: null, now 1"]


@pytest.mark.parametrize(
    ("ranks", "trained"),
    [
        (1, "1 rank of 1 thread"),
        (2, "2 ranks of 1 thread, then 1 rank of 1 thread"),
    ],
)
def test_the_commands_prove_a_run(tmp_path: Path, ranks: int, trained: str) -> None:
    """With the real launcher: on these ranks, then on one, cut where there is no row of metrics."""
    sizes = [
        "image_size=8",
        "samples=64",
        "classes=4",
        "global_batch_size=8",
        "micro_batch_size=4",
        "workers=0",
    ]
    settings = ["epochs=2", "log.every=4", "parallel.threads=1", "ema.decay=0.9", "data.name=synthetic"]
    settings += ["model.width=4", "max_steps=13", *(f"data.{size}" for size in sizes)]

    def trainer(*words: str) -> "subprocess.CompletedProcess[str]":
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        return preloaded.run([sys.executable, "-m", "trainer", *words], cwd=tmp_path, env=environment)

    words = [word for one in settings for word in ("--set", one)]
    asked = ["train", "digits", *words, "--out", "run", "--nproc-per-node", str(ranks), "--stop-after", "6"]
    cut = trainer(*asked)
    assert (cut.returncode, cut.stderr) == (75, "")
    assert named(cut.stdout, "6 --stop-after")
    folder = tmp_path / "run"
    assert json.loads((folder / "manifest.json").read_text())["command"] == f"trainer {' '.join(asked)}"
    assert attempt(folder, load_recipe("digits", settings)).code == 0
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["restarts"], manifest["status"]) == (1, "finished")
    before = contents(folder)
    proof = trainer("verify", "run")
    assert (proof.returncode, proof.stderr) == (0, "")
    assert contents(folder) == before
    first, *_, said, weights = proof.stdout.splitlines()
    assert first.startswith("run: training steps 1 to 13 of 13 again, in ")
    assert said.startswith(f"  13 of 13 steps on {trained}: 5 records")
    assert weights == "  final weights: model.safetensors, ema.safetensors"
    assert not Path(first.rpartition(" in ")[2]).exists()
