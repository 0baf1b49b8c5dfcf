"""Promise: what `trainer export` writes computes what the trained model does, or isn't there."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.commands.test_verify import change
from tests.helpers import planted, preloaded
from tests.helpers.commands import command
from tests.helpers.marked import flip
from tests.helpers.refusals import named
from tests.helpers.run_folders import manifest
from trainer.commands.export import reload
from trainer.commands.export.export import WRITERS
from trainer.data.sources import IMAGE
from trainer.models.export_formats import relative_error
from trainer.train.model_of_run import inputs_of, open_run, read_samples, some_samples
from trainer.train.provenance import file_hash

Patch = pytest.MonkeyPatch
FILES = {"torch-export": "model.pt2", "onnx": "model.onnx", "safetensors": "model.safetensors"}


@pytest.fixture
def run(digits_run: Path) -> Path:
    return digits_run


def export(run: Path, to: str, out: Path, *words: object, code: int = 0) -> str:
    """What it says but for stages: one line where it fails."""
    told = command("export", run, "--to", to, "--out", out, *words, code=code)
    lines = [line for line in told.err.splitlines() if not line.startswith("export: ")]
    assert code == 0 or (told.out, len(lines)) == ("", 1), told
    return "".join(lines)


@pytest.mark.compat
@pytest.mark.parametrize("name", FILES)
def test_what_is_read_again_computes_the_same(
    name: str, run: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another process; one of them is enough here."""
    if name == "torch-export":
        monkeypatch.setattr(subprocess, "run", lambda words, env, **_: preloaded.run(words, env=env))
    else:
        request.getfixturevalue("here")
    if name == "onnx":
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")
    export(run, name, out := tmp_path / "there")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert {path.name for path in out.iterdir()} == {FILES[name], "model.json"}
    about = json.loads((out / "model.json").read_text())
    assert about["file"] == FILES[name]
    assert about["sha256"] == {FILES[name]: file_hash(out / FILES[name])}
    assert about["inputs"] == [{"name": "input", "shape": ["batch", 1, 8, 8], "dtype": "float32"}]
    assert about["outputs"] == [{"name": "output", "shape": ["batch", 10], "dtype": "float32"}]
    assert about["weights"] == "ema.safetensors"
    assert about["data"]["classes"] == list("0123456789")
    assert about["config_hash"] == manifest(run)["config_hash"]
    assert about["checked"]["relative_error"] < 1e-5
    assert about["checked"]["samples"] == 32
    assert {1, 2, 7} < set(about["checked"]["batches"])


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("name", "dtype"), [("torch-export", "bf16"), ("safetensors", "fp32")])
def test_a_bit_that_was_written_otherwise_is_found_and_the_old_one_stays(
    name: str, dtype: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the written tensors where they are there: outputs within a limit show nothing of a bit."""
    write, about = WRITERS[name], json.dumps({"sha256": {FILES[name]: ""}})
    out = planted.write(tmp_path / "out", {"model.json": about, FILES[name]: "an older one"})

    def perturbed(model: nn.Module, inputs: Any, folder: Path) -> Path:
        weight = model.get_parameter("head.weight")
        kept = weight.clone()
        weight.view(torch.uint8).view(-1)[0] ^= 1
        file = write(model, inputs, folder)
        weight.copy_(kept)
        return file

    monkeypatch.setitem(WRITERS, name, perturbed)
    export(run, name, out, "--dtype", dtype, "--force", code=1)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / FILES[name]).read_text() == "an older one\n"


@pytest.mark.usefixtures("here")
def test_pixels_in_and_probabilities_out(run: Path, tmp_path: Path) -> None:
    export(run, "torch-export", tmp_path / "out", "--with-normalization")
    opened = open_run(run)
    batch = read_samples(opened.task.evaluation_data, some_samples(opened.task.evaluation_data, 9))
    probabilities = reload.load_model(tmp_path / "out" / "model.pt2")(batch.fields[IMAGE])
    wanted = opened.model(*inputs_of(opened, batch)).softmax(1)
    torch.testing.assert_close(probabilities, wanted, rtol=1e-5, atol=1e-6)
    about = json.loads((tmp_path / "out" / "model.json").read_text())
    assert about["inputs"] == [{"name": "input", "shape": ["batch", 8, 8, 1], "dtype": "uint8"}]


@pytest.mark.usefixtures("here")
def test_an_export_is_replaced_only_when_told_to(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(run, "safetensors", out)
    before = (out / "model.json").stat().st_ino
    assert "--force" in export(run, "safetensors", out, code=2)
    assert (out / "model.json").stat().st_ino == before
    export(run, "safetensors", out, "--force")
    assert (out / "model.json").stat().st_ino != before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (out / "notes.txt").touch()  # not with other things beside it
    assert named(export(run, "safetensors", out, "--force", code=2), "notes.txt")
    assert (out / "notes.txt").exists()


@pytest.mark.usefixtures("here")
def test_a_signal_leaves_nothing_half_written(run: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    def writer(_model: nn.Module, _inputs: Any, folder: Path) -> Path:
        assert folder.is_dir() and [path.name for path in tmp_path.iterdir()] == [folder.name]
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal came too late")

    monkeypatch.setitem(WRITERS, "safetensors", writer)
    command("export", run, "--to", "safetensors", "--out", tmp_path / "x", code=128 + signal.SIGTERM)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_line(run: Path, tmp_path: Path) -> None:
    limited = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); "
        "sys.dont_write_bytecode = True; "  # Python 3.11 would leave 4096 bytes of it for all others
        "from trainer.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    words = ["export", str(run), "--to", "torch-export", "--out", str(tmp_path / "out")]
    alone = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}  # what it starts has the limit, too
    done = preloaded.run([sys.executable, "-c", limited, *words], env=alone)
    assert (done.returncode, list(tmp_path.iterdir())) == (2, []), done.stderr
    assert named(done.stderr.splitlines()[-1], tmp_path / "out", "--out")


def test_a_fresh_process_that_fails_is_told(run: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    failed = subprocess.CompletedProcess[str]([], 1, "", "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    export(run, "safetensors", tmp_path / "out", code=1)
    assert list(tmp_path.iterdir()) == []


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (
        lambda folder: change(folder, lambda m: m.update(weights={}, status="stopped")),
        "weights",
    ),
    "a flipped bit": (lambda folder: flip(folder / "ema.safetensors", -1, 0), "ema.safetensors"),
    "other classes": (lambda folder: change(folder, lambda m: m["data"]["classes"].reverse()), "classes"),
}


@pytest.mark.parametrize("how", SPOILED)
def test_a_run_that_cant_be_trusted_is_refused(how: str, run: Path, tmp_path: Path) -> None:
    spoil, names = SPOILED[how]
    spoil(folder := shutil.copytree(run, tmp_path / "run"))
    assert named(export(folder, "safetensors", tmp_path / "out", code=2), names)
    assert not (tmp_path / "out").exists()


def test_no_pickle_is_read_where_exports_are(tmp_path: Path, monkeypatch: Patch) -> None:
    """The process that reads an archive tells torch first to unpickle nothing."""
    told: list[str | None] = []

    def load(_: Any) -> Any:
        told.extend(os.environ.get(name) for name in reload.ONLY_WEIGHTS)
        raise KeyboardInterrupt

    for name in reload.ONLY_WEIGHTS:
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(torch.export, "load", load)
    with pytest.raises(KeyboardInterrupt):
        reload.main([str(tmp_path / "model.pt2"), str(tmp_path / "in"), str(tmp_path / "out")])
    assert told == list(reload.ONLY_WEIGHTS.values())


def test_torch_unpickles_nothing_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil.pt").write_bytes(pickle.dumps(print, 2))
    for name, value in reload.ONLY_WEIGHTS.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "evil.pt", weights_only=False)


@pytest.mark.parametrize(
    ("wanted", "given", "error"),
    [
        ([[1.0, -4.0]], [[1.0, -3.0]], 0.25),
        ([[1.0], [8.0]], [[1.5], [8.0]], 0.5),
        ([[1.0]], [[float("nan")]], float("inf")),
        ([], [], float("inf")),
        ([[0.0]], [[0.1]], float("inf")),
        ([[1.0]], [[1.0, 1.0]], float("inf")),
        ([[1.0], [1.0]], [[1.0]], float("inf")),
    ],
)
def test_the_error_is_relative_to_the_largest_value(wanted: Any, given: Any, error: float) -> None:
    assert relative_error([torch.tensor(w) for w in wanted], [torch.tensor(g) for g in given]) == error
