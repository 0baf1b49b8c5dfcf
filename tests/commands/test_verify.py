"""Promise: a run is proved to the bit by training it again, or the first that differs is named."""

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.helpers import preloaded
from tests.helpers.commands import command
from tests.helpers.forked import attempt, small
from tests.helpers.poison import SEED, poison
from tests.helpers.refusals import named, refused
from tests.helpers.run_folders import manifest as read_manifest
from trainer.commands.verify import replay as replaying, verify as verifying
from trainer.commands.verify.recorded import Segment, parts_of, read_recorded
from trainer.config.recipe_file import load_recipe
from trainer.train.provenance import file_hash

Edit = Callable[[dict[str, Any]], object]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def change(folder: Path, edit: Edit) -> None:
    """Changes a run's manifest."""
    facts = read_manifest(folder)
    edit(facts)
    (folder / "manifest.json").write_text(json.dumps(facts))


Forked = list[argparse.Namespace]


def in_a_fork(monkeypatch: pytest.MonkeyPatch, **how: Any) -> Forked:
    """Replays in a fork instead of a launch, in this way; what was asked for."""
    asked = Forked()

    def start(request: argparse.Namespace, *_: Any) -> int:
        asked.append(request)
        recipe = load_recipe(request.recipe, request.set)
        return attempt(request.out, recipe, request.resume, stop_after=request.stop_after, **how).code

    monkeypatch.setattr(replaying, "start", start)
    return asked


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> Forked:
    return in_a_fork(monkeypatch)


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of the whole run."""
    return shutil.copytree(whole, tmp_path / "run")


def verify(folder: Path, *words: str, code: int = 0) -> str:
    before = contents(folder)
    told = command("verify", folder, *words, code=code)
    assert contents(folder) == before, "nothing in it is changed"
    assert told.err == "" if code != 2 else (told.out, told.err.count("\n")) == ("", 1)
    return told.out + told.err


@pytest.mark.usefixtures("forked")
def test_an_identical_run(whole: Path) -> None:
    told = verify(whole)
    # A row: epoch, loss, rate, gradient norm, applied; with every evaluation loss, accuracy and epoch.
    assert named(told, f"{whole} 16 1 10 46")
    names = list(safetensors.torch.load_file(whole / "model.safetensors"))
    assert named(told, f"{8 * len(names)} {len(names)} model.safetensors ema.safetensors")


def test_some_steps_of_the_whole_schedule(whole: Path, forked: Forked) -> None:
    told = verify(whole, "--steps", "7", "--set", "data.prefetch=3")
    assert named(told, "identical 6 16 3") and not named(told, "model.safetensors")
    assert [request.stop_after for request in forked] == [6]
    assert named(verify(whole, "--steps", "17", code=2), "--steps 17 2 16")


def test_rows_that_were_lost_are_cut_back(tmp_path: Path, whole: Path) -> None:
    folder = tmp_path / "run"
    attempt(folder, stop_after=5, code=75)
    assert named(attempt(folder, stop_after=5, code=2).line, "5")
    with (folder / "checksums.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 6, "loss": 9.0, "tensors": []}\n{"kind": ')
    attempt(folder, code=0)
    assert (folder / "checksums.jsonl").read_text() == (whole / "checksums.jsonl").read_text()


@pytest.mark.usefixtures("forked")
def test_a_changed_configuration_is_named(folder: Path) -> None:
    def edit(manifest: dict[str, Any]) -> None:
        manifest["config"]["optim"]["lr"] *= 1.5
        manifest["versions"]["torch"] = "2.1.0"
        manifest["device"]["cpu_capability"] = "MMX"
        del manifest["versions"]["numpy"]

    change(folder, edit)
    told = verify(folder, code=1)
    assert named(told, "2 stem.weight lr manifest.json")
    assert named(told, f"versions.torch 2.1.0 {torch.__version__} device.cpu_capability MMX")
    assert "numpy" not in told


ON_OTHER_DATA = {"step": 9, "changed": ["optim.lr: 1, now 2", "training data: 1, now 2"]}


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda m: m.update(weights=3), "manifest"),
        (lambda m: m["config"].update(lrr=1), "lrr"),
        (lambda m: m["config"]["data"].update(name="folder", path="/nowhere"), "/nowhere"),
        (lambda m: m["fingerprint"].update({"training data": "x"}), "training"),
        (lambda m: m.update(fingerprint={}), "training data"),
        (lambda m: m["config"]["data"].update(path="https://***@h/x"), "data.path"),
        (lambda m: m["attempts"].append(m["attempts"][0] | ON_OTHER_DATA), "9 1 2"),
    ],
)
def test_what_cannot_be_replayed_is_one_line(folder: Path, edit: Edit, says: str) -> None:
    change(folder, edit)
    assert named(verify(folder, code=2), says)


def test_nothing_recorded_is_not_identical(folder: Path, whole: Path) -> None:
    for text in ((whole / "checksums.jsonl").read_text().splitlines()[0] + "\n", "x\ny\n"):
        (folder / "checksums.jsonl").write_text(text)
        verify(folder, code=2)
    (folder / "checksums.jsonl").unlink()
    verify(folder, code=2)
    (folder / "manifest.json").unlink()
    assert named(verify(folder, code=2), "manifest.json")


def test_a_replay_that_is_stopped_proves_nothing(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a signal it ends with the code that a part of a replay ends with."""
    in_a_fork(monkeypatch, stop_at=3)
    told = command("verify", whole, "--steps", 6, code=1)
    assert told.err and "identical" not in told.out
    for code in (1, 2, 76):
        monkeypatch.setattr(replaying, "start", lambda *_, code=code: code)
        command("verify", whole, code=code)


@pytest.mark.usefixtures("forked")
def test_an_extended_run_is_replayed_as_it_was_trained(tmp_path: Path) -> None:
    """Up to the old end by the old configuration, with its schedule and its evaluation."""
    folder = tmp_path / "run"
    attempt(folder, small(max_steps=4), code=0)
    attempt(folder, small(max_steps=8, optim={"lr": 0.002}), "force", stop_after=7, code=75)
    assert named(verify(folder), "identical 6 8")
    changed = read_manifest(folder)["attempts"][1]["changed"]
    assert changed == ["max_steps: 4, now 8", "optim.lr: 0.001, now 0.002"]


@pytest.mark.usefixtures("forked")
def test_a_run_that_draws_its_samples_is_replayed(tmp_path: Path) -> None:
    attempt(tmp_path / "run", small(max_steps=4, data={"class_weights": "balanced"}), code=0)
    assert named(verify(tmp_path / "run"), "identical 4 4")


def parts(folder: Path, until: int, *attempts: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    run = read_recorded(folder)
    one = run.manifest.attempts[0]
    made = [one.model_copy(update={"step": w, "ranks": r, "log_every": e}) for w, r, e in attempts]
    changed = dataclasses.replace(run, manifest=run.manifest.model_copy(update={"attempts": made}))
    return [(part.until, part.ranks, part.every) for part in parts_of(changed, until, None)]


def test_a_run_is_replayed_on_the_ranks_that_trained_it(whole: Path) -> None:
    assert parts(whole, 16, (0, 1, 2), (5, 1, 2)) == [(16, 1, 2)]
    several = parts(whole, 16, (0, 4, 2), (5, 2, 2), (11, 2, 2), (12, 1, 3))
    assert several == [(5, 4, 2), (12, 2, 2), (16, 1, 3)]
    assert parts(whole, 10, (0, 4, 2), (5, 2, 2), (12, 1, 2)) == [(5, 4, 2), (10, 2, 2)]
    assert parts(whole, 4, (0, 4, 2), (5, 2, 2)) == [(4, 4, 2)]
    # The attempt from 5 on left no checkpoint; the one before it began again.
    assert parts(whole, 16, (0, 4, 2), (0, 2, 2), (5, 1, 2), (5, 8, 2)) == [(5, 2, 2), (16, 8, 2)]
    assert parts_of(read_recorded(whole), 8, 3) == [Segment(8, 3, 1, 2)]


def test_the_commands_prove_a_run(tmp_path: Path) -> None:
    """With the real launcher: on two ranks, then on one, cut where there is no row of metrics."""
    settings = ["epochs=2", "log.every=4", "parallel.threads=1", "ema.decay=0.9", "data.name=synthetic"]
    settings += ["model.width=4", "max_steps=13", "data.image_size=8", "data.samples=64", "data.classes=4"]
    settings += ["data.global_batch_size=8", "data.micro_batch_size=4", "data.workers=0"]

    def trainer(*words: str) -> "subprocess.CompletedProcess[str]":
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        return preloaded.run([sys.executable, "-m", "trainer", *words], cwd=tmp_path, env=environment)

    words = [word for one in settings for word in ("--set", one)]
    asked = ["train", "digits", *words, "--out", "run", "--nproc-per-node", "2", "--stop-after", "6"]
    cut = trainer(*asked)
    assert (cut.returncode, cut.stderr) == (75, "")
    assert named(cut.stdout, "6 --stop-after")
    folder = tmp_path / "run"
    assert read_manifest(folder)["command"] == f"trainer {' '.join(asked)}"
    attempt(folder, load_recipe("digits", settings), code=0)
    facts = read_manifest(folder)
    assert (facts["restarts"], facts["status"]) == (1, "finished")
    before = contents(folder)
    proof = trainer("verify", "run")
    assert (proof.returncode, proof.stderr) == (0, "")
    assert contents(folder) == before
    first, *_ = proof.stdout.splitlines()
    assert named(proof.stdout, "13 13 2 ranks 1 rank 5 model.safetensors ema.safetensors")
    assert not Path(first.rpartition(" in ")[2]).exists()


def test_a_run_that_an_anomaly_stopped_is_replayed_up_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, fault = small(**SEED, anomaly={"spike_history": 10}), poison([6], "gradient")
    attempt(tmp_path / "run", recipe, before=fault)
    in_a_fork(monkeypatch, before=fault)
    assert named(command("verify", tmp_path / "run").out, "1 6 16")
    attempt(tmp_path / "at once", recipe, before=poison([0], "gradient"))
    command("verify", tmp_path / "at once", code=2)


@pytest.mark.parametrize(
    ("gpus", "processes", "device", "wanted"),
    [
        (None, None, "cpu", None),
        (None, 2, "cpu", 2),
        ("0,3", None, "cuda", 2),
        ("2", None, "cpu", "--gpus 2"),
    ],
)
def test_the_ranks_that_are_asked_for(
    gpus: str | None, processes: int | None, device: str, wanted: int | str | None
) -> None:
    options = argparse.Namespace(gpus=gpus, nproc_per_node=processes)
    with refused(wanted, gpus) if isinstance(wanted, str) else nullcontext():
        assert replaying.ranks_wanted(options, device) == wanted


Tamper = Callable[[Path], object]


def rows(name: str, edit: Callable[[list[dict[str, Any]]], object]) -> Tamper:
    """Edits the rows of a file."""

    def change_rows(folder: Path) -> None:
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        edit(lines)
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    return change_rows


def of_kind(kind: str, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["kind"] == kind]


METRICS, TRACE = "metrics.jsonl", "checksums.jsonl"


def manifest(edit: Edit) -> Tamper:
    return lambda folder: change(folder, edit)


def flip(lines: list[dict[str, Any]]) -> None:
    """Flips a bit of what was recorded of steps 10 and 12."""
    for step, tensor in ((10, "blocks.1.conv1.weight"), (12, "stem.weight")):
        place = lines[0]["tensors"].index(tensor)
        for line in of_kind("train", lines[1:]):
            if line["step"] == step:
                line["tensors"][place] = f"{int(line['tensors'][place], 16) ^ 1 << 40:016x}"


def changed_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    weights["stem.weight"].view(-1)[0] *= -1
    safetensors.torch.save_file(weights, file)
    change(folder, lambda m: m["weights"].update({file.name: file_hash(file)}))


def no_weights(folder: Path) -> None:
    (file := folder / "model.safetensors").write_bytes(b"x")
    change(folder, lambda m: m["weights"].update({file.name: file_hash(file)}))


def untouched(_: Path) -> None:
    pass


TAMPERED: dict[str, tuple[Tamper, str]] = {
    "nothing": (untouched, "model.safetensors ema.safetensors"),
    "loss": (rows(METRICS, lambda lines: of_kind("train", lines)[3].update(loss=0.01)), METRICS),
    "file of metrics": (lambda folder: (folder / METRICS).unlink(), METRICS),
    "configuration": (manifest(lambda m: m["config"].update(about="another")), "manifest.json hash"),
    "row of the trace": (rows(TRACE, lambda lines: lines.remove(of_kind("train", lines)[4])), "10 train"),
    "end of the trace": (rows(TRACE, lambda lines: lines.__delitem__(slice(5, None))), TRACE),
    "a flipped bit": (rows(TRACE, flip), "9 10 blocks.1.conv1.weight 1 environment"),
    "names": (rows(TRACE, lambda lines: lines[0]["tensors"].pop()), TRACE),
    "changed weights": (changed_weights, "model.safetensors stem.weight 1"),
    "weights": (lambda folder: (folder / "ema.safetensors").unlink(), "ema.safetensors"),
    "no weights": (no_weights, "model.safetensors"),
    "hash of weights": (manifest(lambda m: m["weights"].pop("model.safetensors")), "model.safetensors"),
    "other hash": (manifest(lambda m: m["weights"].update({"model.safetensors": "00"})), "model.safetensors"),
}


@pytest.mark.parametrize(("tamper", "says"), TAMPERED.values(), ids=TAMPERED)
def test_what_is_missing_or_was_changed_is_a_difference(
    folder: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, tamper: Tamper, says: str
) -> None:
    """To what a replay of the whole run would leave; without one."""

    def replay(*arguments: Any) -> int:
        for name in ("manifest.json", TRACE, "model.safetensors", "ema.safetensors"):
            shutil.copy(whole / name, arguments[3])
        return 0

    monkeypatch.setattr(verifying, "replay", replay)
    tamper(folder)
    assert named(verify(folder, code=int(tamper is not untouched)), says)
