"""Promise: what `trainer export` writes computes what the trained model does, or isn't there."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
from torch import nn

from tests.helpers import preloaded
from tests.helpers.trained import train_digits
from trainer.cli import main
from trainer.commands.export import check, export as export_module, reload
from trainer.commands.export.export import WRITERS
from trainer.data.sources import IMAGE
from trainer.errors import BadInputError
from trainer.models.export_formats import relative_error
from trainer.train.model_of_run import inputs_of, open_run, read_samples, some_samples
from trainer.train.provenance import file_hash

FILES = {
    "torch-export": "model.pt2",
    "onnx": "model.onnx",
    "torchscript": "model.ts",
    "safetensors": "model.safetensors",
}


@pytest.fixture
def run(digits_run: Path) -> Path:
    return digits_run


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads exports in this process: a fresh one imports torch for seconds."""

    def without_a_process(words: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(words, reload.main(words[3:]), "", "")

    for name, value in reload.ONLY_WEIGHTS.items():
        monkeypatch.setenv(name, value)
    stub = SimpleNamespace(
        run=without_a_process, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
    monkeypatch.setattr(check, "subprocess", stub)


def export(run: Path, *words: str, code: int = 0) -> None:
    assert main(["export", str(run), *words]) == code


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    told = capsys.readouterr()
    lines = [line for line in told.err.splitlines(keepends=True) if not line.startswith("export: ")]  # stages
    assert (told.out, len(lines)) == ("", 1), told
    return lines[0]


@pytest.mark.compat
@pytest.mark.parametrize("name", FILES)
def test_a_fresh_process_computes_the_same(name: str, run: Path, tmp_path: Path) -> None:
    if name == "onnx":
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")
    export(run, "--to", name, "--out", str(tmp_path / "there"))
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == sorted([FILES[name], "model.json"])
    about = json.loads((tmp_path / "there" / "model.json").read_text())
    assert about["file"] == FILES[name]
    assert about["sha256"] == {FILES[name]: file_hash(tmp_path / "there" / FILES[name])}
    assert about["inputs"] == [{"name": "input", "shape": ["batch", 1, 8, 8], "dtype": "float32"}]
    assert about["outputs"] == [{"name": "output", "shape": ["batch", 10], "dtype": "float32"}]
    assert about["weights"] == "ema.safetensors"
    assert about["data"]["classes"] == list("0123456789")
    assert about["config_hash"] == json.loads((run / "manifest.json").read_text())["config_hash"]
    assert about["checked"]["relative_error"] < 1e-5
    assert about["checked"]["samples"] == 32
    assert {1, 2, 7} < set(about["checked"]["batches"])


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", ["torch-export", "torchscript", "safetensors"])
def test_in_bfloat16_the_file_is_compared_and_not_the_rounding(name: str, run: Path, tmp_path: Path) -> None:
    export(run, "--to", name, "--dtype", "bf16", "--out", str(tmp_path / "out"))
    checked = json.loads((tmp_path / "out" / "model.json").read_text())["checked"]
    assert checked["rounding"] > 1e-4
    assert checked["relative_error"] <= checked["limit"] == (1e-4 if name == "safetensors" else 2e-2)
    trained = open_run(run).model.state_dict()
    if name == "safetensors":
        written = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
        assert written.keys() == trained.keys()
    elif name == "torch-export":
        stored = torch.export.load(tmp_path / "out" / "model.pt2").state_dict
        written = {key.removeprefix("model."): tensor for key, tensor in stored.items()}
    for key, tensor in written.items() if name != "torchscript" else ():
        low = tensor.is_floating_point()
        assert torch.equal(tensor, trained[key].to(torch.bfloat16) if low else trained[key])


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["torch-export", "safetensors"])
def test_one_bit_that_was_written_otherwise_is_found(
    name: str, dtype: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the written tensors; outputs within a limit show nothing of it."""
    write = WRITERS[name]

    def perturbed(model: nn.Module, inputs: Any, folder: Path) -> Path:
        weight = next(tensor for tensor in model.state_dict().values() if tensor.is_floating_point())
        kept = weight.clone()
        weight.view(torch.uint8).view(-1)[0] ^= 1
        file = write(model, inputs, folder)
        weight.copy_(kept)
        return file

    monkeypatch.setitem(WRITERS, name, perturbed)
    export(run, "--to", name, "--dtype", dtype, "--out", str(tmp_path / "out"), code=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("here")
def test_pixels_in_and_probabilities_out(run: Path, tmp_path: Path) -> None:
    export(run, "--to", "torchscript", "--with-normalization", "--out", str(tmp_path / "out"))
    opened = open_run(run)
    batch = read_samples(opened.task.evaluation_data, some_samples(opened.task.evaluation_data, 9))
    probabilities = reload.load_model(tmp_path / "out" / "model.ts")(batch.fields[IMAGE])
    wanted = opened.model(*inputs_of(opened, batch)).softmax(1)
    torch.testing.assert_close(probabilities, wanted, rtol=1e-5, atol=1e-6)
    about = json.loads((tmp_path / "out" / "model.json").read_text())
    assert about["inputs"] == [{"name": "input", "shape": ["batch", 8, 8, 1], "dtype": "uint8"}]


@pytest.mark.usefixtures("here")
def test_the_model_is_the_one_that_was_evaluated(run: Path) -> None:
    opened = open_run(run)
    data = opened.task.evaluation_data
    batch = read_samples(data, some_samples(data, len(data)))
    right = float(opened.task.measure(opened.model, batch)["accuracy"]) / len(data)
    summary = json.loads((run / "manifest.json").read_text())["summary"]
    assert right == pytest.approx(summary["accuracy"], abs=1e-9)
    assert right > 0.9


@pytest.mark.usefixtures("here")
def test_a_stopped_run_gives_its_newest_checkpoint(tmp_path: Path) -> None:
    run = train_digits(tmp_path / "stopped", stop_after=7)
    export(run, "--to", "torchscript")
    opened = open_run(run)
    saved = safetensors.torch.load_file(run / "checkpoints" / "step-00000007" / "ema.safetensors")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in opened.model.named_parameters())
    buffers = safetensors.torch.load_file(run / "checkpoints" / "step-00000007" / "model.safetensors")
    assert all(torch.equal(tensor, buffers[name]) for name, tensor in opened.model.named_buffers())
    about = json.loads((run / "export" / "torchscript-fp32" / "model.json").read_text())
    assert about["weights"] == "checkpoints/step-00000007/ema.safetensors"


@pytest.mark.usefixtures("here")
def test_an_export_is_replaced_only_when_told_to(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--to", "safetensors", "--out", str(tmp_path / "out")]
    export(run, *words)
    before = (tmp_path / "out" / "model.json").stat().st_ino
    capsys.readouterr()
    export(run, *words, code=2)
    assert "--force" in one_line(capsys)
    assert (tmp_path / "out" / "model.json").stat().st_ino == before
    export(run, *words, "--force")
    assert (tmp_path / "out" / "model.json").stat().st_ino != before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    capsys.readouterr()
    export(run, "--to", "safetensors", "--out", str(tmp_path / "mine"), "--force", code=2)
    assert "no export" in one_line(capsys)
    assert (tmp_path / "mine" / "thesis.txt").exists()
    # Beside an export of ours, too; and a model.json may be anybody's.
    (tmp_path / "out" / "notes.txt").touch()
    (tmp_path / "mine" / "model.json").write_text("{}")
    for name, other in (("out", "notes.txt"), ("mine", "model.json")):
        export(run, "--to", "safetensors", "--out", str(tmp_path / name), "--force", code=2)
        assert f"holds other things too ({other})" in one_line(capsys)
        assert (tmp_path / name / other).exists()


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_leaves_nothing_half_written(
    number: int, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def writer(_model: nn.Module, _inputs: Any, folder: Path) -> Path:
        assert folder.is_dir() and [path.name for path in tmp_path.iterdir()] == [folder.name]
        os.kill(os.getpid(), number)
        raise AssertionError("the signal came too late")

    monkeypatch.setitem(WRITERS, "safetensors", writer)
    with pytest.raises(SystemExit) as ended:
        main(["export", str(run), "--to", "safetensors", "--out", str(tmp_path / "x")])
    assert ended.value.code == 128 + number
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr().err.splitlines() == [
        "export: writing safetensors (fp32)",
        f"trainer: stopped by {signal.Signals(number).name}",
    ]


def test_a_full_folder_of_temporary_files_is_one_line(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(check, "write_file", full)
    assert main(["export", str(run), "--to", "safetensors", "--out", str(tmp_path / "out")]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "inputs.safetensors: can't be written (No space left on device); make room, or give" in line
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_can_never_be_written_is_refused_before_the_model_is_built(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(export_module, "open_run", mock.Mock(side_effect=AssertionError))
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for place in ("file/below/it", "loop", "loop/x"):
        assert main(["export", str(run), "--to", "safetensors", "--out", str(tmp_path / place)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3


@pytest.mark.parametrize("name", [pytest.param("torch-export", marks=pytest.mark.slow), "torchscript"])
def test_a_full_disk_is_one_line(name: str, run: Path, tmp_path: Path) -> None:
    limited = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); "
        "sys.dont_write_bytecode = True; "  # Python 3.11 would leave 4096 bytes of it for all others
        "from trainer.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    words = ["export", str(run), "--to", name, "--out", str(tmp_path / "out")]
    alone = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}  # what it starts has the limit, too
    done = preloaded.run([sys.executable, "-c", limited, *words], env=alone)
    assert (done.returncode, list(tmp_path.iterdir())) == (2, []), done.stderr
    assert "out: can't be written (File too large); give another --out" in done.stderr.splitlines()[-1]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("factor", [1 + 3e-3, float("nan")])
def test_another_models_file_is_found_and_the_old_one_stays(
    factor: float,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--to", "torchscript", "--out", str(tmp_path / "out")]
    export(run, *words)
    old = file_hash(tmp_path / "out" / "model.ts")
    write = WRITERS["torchscript"]

    def perturbed(model: nn.Module, inputs: Any, folder: Path) -> Path:
        model.get_parameter("head.weight").mul_(factor)
        return write(model, inputs, folder)

    monkeypatch.setitem(WRITERS, "torchscript", perturbed)
    capsys.readouterr()
    export(run, *words, "--force", code=1)
    assert "nothing was written" in one_line(capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert file_hash(tmp_path / "out" / "model.ts") == old


def test_a_fresh_process_that_fails_is_told(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def torn(_model: nn.Module, _inputs: Any, folder: Path) -> Path:
        (folder / "model.safetensors").write_bytes(b"\0" * 64)
        return folder / "model.safetensors"

    monkeypatch.setitem(WRITERS, "safetensors", torn)
    export(run, "--to", "safetensors", "--out", str(tmp_path / "out"), code=1)
    assert "a fresh process can't read or run it" in one_line(capsys)
    assert list(tmp_path.iterdir()) == []


def _without_weights(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "weights": {}, "status": "stopped"}))


def _bit_flipped(folder: Path) -> None:
    file = folder / "ema.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def _no_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def _another_width(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"width": 16', '"width": 8'))


def _other_classes(folder: Path) -> None:
    facts = json.loads((folder / "manifest.json").read_text())
    facts["data"]["classes"][0] = "cat"
    (folder / "manifest.json").write_text(json.dumps(facts))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_without_weights, "no weights yet"),
        (_bit_flipped, "isn't what the run wrote"),
        (_no_manifest, "not a run folder"),
        (_another_width, "isn't of the manifest's model"),
        (_other_classes, "the data here has other classes than the run was trained with"),
    ],
)
def test_a_run_that_cant_be_trusted_is_refused(
    spoil: Callable[[Path], None], said: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    spoil(folder)
    export(folder, "--to", "safetensors", "--out", str(tmp_path / "out"), code=2)
    assert said in one_line(capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "pickle"], "invalid choice"),
        (["--to", "onnx", "--dtype", "bf16"], "bfloat16"),
        (["--to", "safetensors", "--with-normalization"], "weights only"),
        (["--to", "safetensors", "--set", "model.width=3"], "data.path"),
    ],
)
def test_what_cant_be_asked_for_is_one_line(
    words: list[str], said: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["export", str(run), *words, "--out", str(tmp_path / "out")])
    except SystemExit as left:
        code = int(left.code or 0)
    assert code == 2
    assert said in one_line(capsys)


def test_without_onnx_it_says_how_to_get_it(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(export_module, "missing_packages", lambda *_: "onnxruntime")
    export(run, "--to", "onnx", code=2)
    assert "pip install onnx onnxscript onnxruntime" in one_line(capsys)


def test_a_task_without_inputs_is_told(run: Path) -> None:
    opened = open_run(run)
    bare: Any = SimpleNamespace(evaluation_data=opened.task.evaluation_data)
    with pytest.raises(BadInputError, match=r"inputs\(batch\)"):
        inputs_of(
            opened._replace(task=bare),
            read_samples(bare.evaluation_data, some_samples(bare.evaluation_data, 1)),
        )


def test_no_pickle_is_read_where_exports_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    (tmp_path / "evil.pt").write_bytes(pickle.dumps(_Evil(tmp_path / "done")))
    for name, value in reload.ONLY_WEIGHTS.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "evil.pt", weights_only=False)
    assert not (tmp_path / "done").exists()


class _Evil:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


@pytest.mark.parametrize(
    ("wanted", "given", "error"),
    [
        ([[1.0, -4.0]], [[1.0, -4.0]], 0.0),
        ([[1.0, -4.0]], [[1.0, -3.0]], 0.25),
        ([[1.0], [8.0]], [[1.5], [8.0]], 0.5),
        ([[1.0]], [[float("nan")]], float("inf")),
        ([[float("nan")]], [[float("nan")]], float("inf")),
        ([], [], float("inf")),
        ([[float("inf")]], [[1.0]], float("inf")),
        ([[0.0]], [[0.1]], float("inf")),
        ([[1.0]], [[1.0, 1.0]], float("inf")),
        ([[1.0], [1.0]], [[1.0]], float("inf")),
    ],
)
def test_the_error_is_relative_to_the_largest_value(wanted: Any, given: Any, error: float) -> None:
    assert relative_error([torch.tensor(w) for w in wanted], [torch.tensor(g) for g in given]) == error


# Folding
