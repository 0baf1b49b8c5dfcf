"""Promise: what is missing of a run's files, or contradicts itself, is a difference."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from tests.commands.test_verify import METRICS, TRACE, Capsys, change, of_kind, rows, verify
from tests.helpers.refusals import named
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
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    change(folder, lambda m: m["weights"].update({file.name: digest}))


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"x")
    digest = hashlib.sha256(b"x").hexdigest()
    change(folder, lambda m: m["weights"].update({"model.safetensors": digest}))


EVALUATIONS, SUMMARY = "evaluations.jsonl", "summary.jsonl"


TAMPERED: dict[str, tuple[Callable[[Path], object], str]] = {
    "loss": (
        rows(METRICS, lambda lines: of_kind("train", lines)[3].update(loss=0.01)),
        "metrics.jsonl 8 loss 0.01",
    ),
    "accuracy": (
        rows(EVALUATIONS, lambda lines: of_kind("eval", lines)[1].update(accuracy=0.99)),
        "evaluations.jsonl 16 accuracy 0.99",
    ),
    "accuracy at the end": (
        rows(SUMMARY, lambda lines: of_kind("end", lines)[0].update(accuracy=0.99)),
        "summary.jsonl accuracy 0.99",
    ),
    "summary": (manifest(lambda m: m["summary"].update(accuracy=0.99)), "summary accuracy 0.99"),
    "both": (
        lambda folder: [
            rows(name, lambda lines: of_kind("eval", lines)[0].update(accuracy=0.75))(folder)
            for name in (EVALUATIONS, TRACE)
        ],
        "8 accuracy 0.75",
    ),
    "row of metrics": (
        rows(METRICS, lambda lines: lines.remove(of_kind("train", lines)[4])),
        "metrics.jsonl 10",
    ),
    "row of another kind": (
        rows(EVALUATIONS, lambda lines: lines.append({"kind": "memory", "step": 16})),
        "1 evaluations.jsonl",
    ),
    "file of metrics": (lambda folder: (folder / METRICS).unlink(), "metrics.jsonl"),
    "garbled metrics": (garbled(METRICS), "1 metrics.jsonl"),
    "garbled trace": (garbled(TRACE), "1 checksums.jsonl"),
    "row of the trace": (rows(TRACE, lambda lines: lines.remove(of_kind("train", lines)[4])), "10 train"),
    "end of the trace": (rows(TRACE, lambda lines: lines.__delitem__(slice(5, None))), "8 eval"),
    "fingerprints": (rows(TRACE, without_tensors), "2 stem.weight"),
    "a flipped bit": (rows(TRACE, flip), "9 10 blocks.1.conv1.weight 1 environment"),
    "changed weights": (changed_weights, "model.safetensors stem.weight 1"),
    "names": (rows(TRACE, lambda lines: lines[0]["tensors"].pop()), "checksums.jsonl"),
    "a tensor": (rows(TRACE, fewer_tensors), "2"),
    "weights": (lambda folder: (folder / "ema.safetensors").unlink(), "ema.safetensors"),
    "no weights": (no_weights, "model.safetensors"),
    "hash of weights": (manifest(lambda m: m["weights"].pop("model.safetensors")), "model.safetensors"),
    "other hash": (
        manifest(lambda m: m["weights"].update({"model.safetensors": "00"})),
        "model.safetensors",
    ),
    "threads": (manifest(lambda m: m.update(threads=2)), "manifest.json threads 2 1"),
    "config.yaml": (lambda folder: (folder / "config.yaml").write_text("seed: 1\n"), "config.yaml"),
    "no config.yaml": (lambda folder: (folder / "config.yaml").unlink(), "config.yaml"),
    "a row of the trace twice": (
        rows(TRACE, lambda lines: lines.insert(2, {**lines[2], "loss": 0.001})),
        "checksums.jsonl 4 2",
    ),
    "a row after the end": (
        lambda folder: [
            rows(name, lambda lines: lines.append({**of_kind("train", lines)[0], "step": 99}))(folder)
            for name in (METRICS, TRACE)
        ],
        "checksums.jsonl 99 16",
    ),
    "summary of a run without its last row": (
        manifest(lambda m: m["attempts"][0].update(jsonl=False) or m.update(summary=[0.99])),
        "summary accuracy",
    ),
    "diverged with weights": (manifest(lambda m: m.update(status="diverged")), "status diverged"),
    "stopped without weights": (
        manifest(lambda m: m.update(status="stopped", weights={})),
        "status stopped summary.jsonl",
    ),
    "steps": (manifest(lambda m: m.update(steps_done=14)), "steps 14 16"),
    "planned steps": (manifest(lambda m: m.update(planned_steps=99)), "planned_steps 99 16"),
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
    assert named(verify(whole, code=0, capsys=capsys), "model.safetensors ema.safetensors")


@pytest.mark.usefixtures("copied")
@pytest.mark.parametrize(("tamper", "says"), TAMPERED.values(), ids=TAMPERED)
def test_what_is_missing_or_contradicts_itself_is_a_difference(
    tmp_path: Path, whole: Path, capsys: Capsys, tamper: Callable[[Path], object], says: str
) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    tamper(folder)
    assert named(verify(folder, code=1, capsys=capsys), says)


def test_an_emptied_fingerprint_of_the_data_is_one_line(tmp_path: Path, whole: Path, capsys: Capsys) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    change(folder, lambda m: m.update(fingerprint={}))
    assert named(verify(folder, code=2, capsys=capsys), "training data")
