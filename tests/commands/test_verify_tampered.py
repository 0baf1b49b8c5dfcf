"""Promise: what is missing of a run's files, or contradicts itself, is a difference."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.commands.test_verify import METRICS, TRACE, Capsys, change, of_kind, rows, verify
from trainer.commands.verify import verify as module


def manifest(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return lambda folder: change(folder, edit)


def garbled(name: str) -> Callable[[Path], object]:
    def garble(folder: Path) -> None:
        lines = (folder / name).read_text().splitlines(keepends=True)
        lines[3] = lines[3][:20] + "\n"
        (folder / name).write_text("".join(lines))

    return garble


def fewer_tensors(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        del line["tensors"][2:3]


def without_tensors(lines: list[dict[str, Any]]) -> None:
    for line in lines[1:-2]:
        line["tensors"] = []


EVALUATIONS, SUMMARY = "evaluations.jsonl", "summary.jsonl"


TAMPERED: dict[str, tuple[Callable[[Path], object], str]] = {
    "loss": (
        rows(METRICS, lambda lines: of_kind("train", lines)[3].update(loss=0.01)),
        "metrics.jsonl, step 8: loss 0.01, recorded ",
    ),
    "learning rate": (
        rows(METRICS, lambda lines: of_kind("train", lines)[0].update(lr=1)),
        "metrics.jsonl, step 2: lr 1, recorded ",
    ),
    "epoch": (
        rows(METRICS, lambda lines: of_kind("train", lines)[0].update(epoch=1.5)),
        "metrics.jsonl, step 2: epoch 1.5, recorded 0.25",
    ),
    "accuracy": (
        rows(EVALUATIONS, lambda lines: of_kind("eval", lines)[1].update(accuracy=0.99)),
        "evaluations.jsonl, step 16: accuracy 0.99, recorded ",
    ),
    "accuracy at the end": (
        rows(SUMMARY, lambda lines: of_kind("end", lines)[0].update(accuracy=0.99)),
        "summary.jsonl: accuracy 0.99, and ",
    ),
    "summary": (
        manifest(lambda m: m["summary"].update(accuracy=0.99)),
        "summary: accuracy 0.99, and ",
    ),
    "both": (
        lambda folder: [
            rows(name, lambda lines: of_kind("eval", lines)[0].update(accuracy=0.75))(folder)
            for name in (EVALUATIONS, TRACE)
        ],
        "first at step 8: accuracy 0.75, now ",
    ),
    "row of metrics": (
        rows(METRICS, lambda lines: lines.remove(of_kind("train", lines)[4])),
        "metrics.jsonl: the row of train metrics of step 10 is missing",
    ),
    "row of another kind": (
        rows(EVALUATIONS, lambda lines: lines.append({"kind": "memory", "step": 16})),
        "1 lines of evaluations.jsonl can't be read, or are there twice",
    ),
    "file of evaluations": (
        lambda folder: (folder / EVALUATIONS).unlink(),
        "evaluations.jsonl can't be read (No such file",
    ),
    "file of metrics": (
        lambda folder: (folder / METRICS).unlink(),
        "metrics.jsonl can't be read (No such file",
    ),
    "garbled metrics": (garbled(METRICS), "1 lines of metrics.jsonl can't be read"),
    "garbled trace": (garbled(TRACE), "1 lines of checksums.jsonl can't be read"),
    "row of the trace": (
        rows(TRACE, lambda lines: lines.remove(of_kind("train", lines)[4])),
        "first at step 10: row of train metrics missing, now there",
    ),
    "end of the trace": (
        rows(TRACE, lambda lines: lines.__delitem__(slice(5, None))),
        "first at step 8: row of eval metrics missing, now there",
    ),
    "fingerprints": (rows(TRACE, without_tensors), "first at step 2: stem.weight, "),
    "names": (
        rows(TRACE, lambda lines: lines[0]["tensors"].pop()),
        " lines of checksums.jsonl can't be read",
    ),
    "a tensor": (rows(TRACE, fewer_tensors), "first at step 2: "),
    "weights": (lambda folder: (folder / "ema.safetensors").unlink(), "ema.safetensors is missing"),
    "hash of weights": (
        manifest(lambda m: m["weights"].pop("model.safetensors")),
        "the hash of model.safetensors is missing",
    ),
    "other hash": (
        manifest(lambda m: m["weights"].update({"model.safetensors": "00"})),
        "model.safetensors isn't the file that the run wrote",
    ),
    "seed": (manifest(lambda m: m.update(seed=7)), "manifest.json: seed is 7, and 0 by its config"),
    "threads": (manifest(lambda m: m.update(threads=2)), "manifest.json: threads is 2, and 1 by its config"),
    "config.yaml": (
        lambda folder: (folder / "config.yaml").write_text("seed: 1\n"),
        "config.yaml isn't the config in manifest.json",
    ),
    "no config.yaml": (lambda folder: (folder / "config.yaml").unlink(), "config.yaml can't be read"),
    "a row of the trace twice": (
        rows(TRACE, lambda lines: lines.insert(2, {**lines[2], "loss": 0.001})),
        "checksums.jsonl: the row of train metrics of step 4 is there 2 times",
    ),
    "a row after the end": (
        lambda folder: [
            rows(name, lambda lines: lines.append({**of_kind("train", lines)[0], "step": 99}))(folder)
            for name in (METRICS, TRACE)
        ],
        "checksums.jsonl: a row of step 99, and the run has 16",
    ),
    "nested metrics": (
        lambda folder: (folder / TRACE).open("a").write("[" * 100_000 + "\n"),
        "1 lines of checksums.jsonl can't be read",
    ),
    "nested config.yaml": (
        lambda folder: (folder / "config.yaml").write_text("[" * 600),
        "config.yaml can't be read",
    ),
    "summary of a run without its last row": (
        manifest(lambda m: m["attempts"][0].update(jsonl=False) or m.update(summary=[0.99])),
        "summary: accuracy None, and ",
    ),
    "stopped with weights": (
        manifest(lambda m: m.update(status="stopped")),
        "manifest.json: status is stopped, though it names final weights",
    ),
    "diverged with weights": (
        manifest(lambda m: m.update(status="diverged")),
        "manifest.json: status is diverged, though it names final weights",
    ),
    "stopped without weights": (
        manifest(lambda m: m.update(status="stopped", weights={})),
        "manifest.json: status is stopped, though summary.jsonl has the row of the run's end",
    ),
    "steps": (
        manifest(lambda m: m.update(steps_done=14)),
        "manifest.json: steps is 14, and 16 by its config",
    ),
    "planned steps": (
        manifest(lambda m: m.update(planned_steps=99)),
        "manifest.json: planned_steps is 99, and 16 by its config",
    ),
}


@pytest.fixture
def copied(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a replay of the whole run would leave, without one."""

    def replay(*arguments: Any) -> int:
        for name in ("manifest.json", TRACE, "model.safetensors", "ema.safetensors"):
            shutil.copy(whole / name, arguments[3])
        return 0

    monkeypatch.setattr(module, "replay", replay)


@pytest.mark.usefixtures("copied")
def test_what_was_not_touched_is_no_difference(whole: Path, capsys: Capsys) -> None:
    verify(whole, code=0, capsys=capsys)


@pytest.mark.usefixtures("copied")
@pytest.mark.parametrize(("tamper", "says"), TAMPERED.values(), ids=TAMPERED)
def test_what_is_missing_or_contradicts_itself_is_a_difference(
    tmp_path: Path, whole: Path, capsys: Capsys, tamper: Callable[[Path], object], says: str
) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    tamper(folder)
    assert says in verify(folder, code=1, capsys=capsys)


@pytest.mark.parametrize("fingerprint", [{}, {"training data": ""}])
def test_an_emptied_fingerprint_of_the_data_is_one_line(
    tmp_path: Path, whole: Path, capsys: Capsys, fingerprint: dict[str, str]
) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    change(folder, lambda m: m.update(fingerprint=fingerprint))
    assert "its data isn't here (training data: " in verify(folder, code=2, capsys=capsys)
