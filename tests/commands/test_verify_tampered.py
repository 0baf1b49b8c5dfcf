"""Promise: what is missing of a run's files, or was changed, is a difference."""

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


TAMPERED: dict[str, tuple[Callable[[Path], object], str]] = {
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
def test_what_is_missing_or_was_changed_is_a_difference(
    tmp_path: Path, whole: Path, capsys: Capsys, tamper: Callable[[Path], object], says: str
) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    tamper(folder)
    assert named(verify(folder, code=1, capsys=capsys), says)
