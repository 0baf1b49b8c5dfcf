"""Promise: one command trains on real data, on one rank or several; the run folder holds everything."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml

from tests.helpers.rows import read_rows
from trainer.errors import BadInputError
from trainer.models import ModelConfig, build_model
from trainer.run_folder import check_space

ROOT = Path(__file__).parents[2]
QUICK = ["--set", "epochs=2", "--set", "data.micro_batch=32", "--set", "parallel.threads=1"]


def run(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(
        command,
        cwd=folder,
        env=os.environ | paths | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def trainer(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(folder, sys.executable, "-m", "trainer", *arguments, **environment)


def test_digits_reach_98_percent(tmp_path: Path) -> None:
    done = trainer(tmp_path, "train", "digits")
    assert done.returncode == 0, done.stderr
    # But for the one line of a run in a container's own file system, where these tests may run as well.
    assert not [line for line in done.stderr.splitlines() if "lies in the container itself" not in line]
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"digits-[0-9a-f]{8}-1", folder.name)
    rows = read_rows(folder)
    end = rows[-1]
    assert end["kind"] == "end"
    assert end["accuracy"] >= 0.98
    assert f"accuracy     {end['accuracy']:.4f}" in done.stdout
    assert f"run folder   runs/{folder.name}" in done.stdout
    assert "samples/s" in done.stdout
    # 60 s on two quiet cores is the promise; 2.5 times that is left to a busy CI machine.
    assert end["seconds"] < 150

    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["status"] == "finished"
    assert manifest["summary"]["accuracy"] == end["accuracy"]
    assert manifest["windows"] == end["window"]
    assert manifest["data"]["classes"] == list("0123456789")
    assert (manifest["data"]["mean"], manifest["data"]["std"]) == ([0.287], [0.354])
    assert yaml.safe_load((folder / "config.yaml").read_text()) == manifest["config"]
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    # The weights are plain safetensors, and the averaged ones are those that were measured.
    config = ModelConfig(**manifest["config"]["model"])
    for name in ("model", "ema"):
        model = build_model(config, 1, 10)
        model.load_state_dict(safetensors.torch.load_file(folder / f"{name}.safetensors"))
    from trainer.data.sources import DataConfig, load_images

    images: Any = load_images(DataConfig(), 0)
    pixels = torch.from_numpy(images.evaluation.arrays["image"]).permute(0, 3, 1, 2)
    pixels = (pixels.float() / 255 - 0.287) / 0.354
    with torch.inference_mode():
        right = model.eval()(pixels).argmax(1) == torch.from_numpy(images.evaluation.arrays["label"])
    assert float(right.float().mean()) == pytest.approx(end["accuracy"], abs=1.5 / 360)


def test_a_second_run_is_the_same_in_a_new_folder(tmp_path: Path) -> None:
    for number in (1, 2):
        done = trainer(tmp_path, "train", "digits", *QUICK)
        assert done.returncode == 0, done.stderr
        assert len(list((tmp_path / "runs").iterdir())) == number
    first, second = sorted((tmp_path / "runs").iterdir())
    assert (first.name[:-1], first.name[-1], second.name[-1]) == (second.name[:-1], "1", "2")
    losses = [[row.get("loss") for row in read_rows(folder)] for folder in (first, second)]
    assert losses[0] == losses[1], "the same configuration is the same run"


def test_two_ranks_and_torchrun_are_the_same_thing(tmp_path: Path) -> None:
    done = trainer(tmp_path, "train", "digits", "--ranks", "2", "--out", "mine", *QUICK)
    assert done.returncode == 0, done.stderr
    assert "2 x CPU" in done.stdout
    assert "Gloo" not in done.stdout
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run(tmp_path, *torchrun, "-m", "trainer", "train", "digits", *QUICK)
    assert done.returncode == 0, done.stderr
    (folder,) = (path for path in (tmp_path / "runs").iterdir() if path.is_dir())
    assert json.loads((folder / "manifest.json").read_text())["world_size"] == 2
    ours, theirs = (read_rows(path) for path in (tmp_path / "mine", folder))
    assert [row.get("loss") for row in ours] == [row.get("loss") for row in theirs]


BROKEN = """
import sys, trainer.run, trainer.tasks.classification as c
original, calls = c.Classification.loss, []
def loss(self, model, batch):
    import os
    calls.append(0)
    if os.environ["RANK"] == "1" and len(calls) == 5:
        raise RuntimeError("the fifth shard of rank 1")
    return original(self, model, batch)
c.Classification.loss = loss
"""


def test_a_rank_that_raises_takes_the_job_down_in_seconds(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nif 'RANK' in os.environ and 'WORLD_SIZE' in os.environ:\n"
        + "".join(f"    {line}\n" for line in BROKEN.strip().splitlines())
    )
    began = time.monotonic()
    done = trainer(tmp_path, "train", "digits", "--ranks", "2", *QUICK, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert time.monotonic() - began < 60, "most of it are imports"
    assert done.returncode == 1
    assert "RuntimeError: the fifth shard of rank 1" in done.stderr
    assert done.stderr.count("Traceback") == 1
    manifest = next((tmp_path / "runs").glob("*/manifest.json"))
    assert json.loads(manifest.read_text())["status"] == "failed"


def test_a_run_that_diverges_says_so(tmp_path: Path) -> None:
    wild = ["--set", "optim.lr=1e30", "--set", "optim.clip=0", "--set", "max_windows=30"]
    done = trainer(tmp_path, "train", "digits", "--out", "run", *wild)
    assert done.returncode == 1
    assert "isn't finite; lower optim.lr" in done.stderr and "Traceback" not in done.stderr
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["status"] == "diverged"


def test_a_reader_that_leaves_does_not_end_the_training(tmp_path: Path) -> None:
    words = " ".join(QUICK)
    command = f"{sys.executable} -m trainer train digits --out run {words} | head -1; exit ${{PIPESTATUS[0]}}"
    done = run(tmp_path, "bash", "-c", command)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "ema.safetensors").exists()


def test_a_disk_that_is_too_full_is_told_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 4 << 20})())
    with pytest.raises(BadInputError, match="4 MiB are free but the run writes about 5 MiB"):
        check_space(tmp_path, build_model(ModelConfig(), 1, 10), copies=2)


def test_bad_data_found_by_the_ranks_is_one_line(tmp_path: Path) -> None:
    from tests.data.test_loader import make_folder

    data = make_folder(tmp_path / "data")
    for image in (data / "train").rglob("*.png"):
        image.write_bytes(image.read_bytes()[:200])
    settings = ["data.name=folder", f"data.path={data}", "data.image_size=16", "data.global_batch=4"]
    settings += ["data.micro_batch=2", "data.augment=none", "data.workers=1"]
    words = [word for setting in settings for word in ("--set", setting)]
    done = trainer(tmp_path, "train", "digits", "--ranks", "2", *words)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert "not a readable image" in done.stderr


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_synthetic_resnet_runs_without_data(tmp_path: Path, mode: str) -> None:
    settings = ["model.name=resnet18", "data.image_size=32", "data.samples=64", "data.global_batch=16"]
    settings += ["data.micro_batch=8", "data.classes=10", "max_windows=3", f"precision.mode={mode}"]
    words = [word for setting in settings for word in ("--set", setting)]
    done = trainer(tmp_path, "train", "resnet50-synthetic", "--out", "run", *words)
    assert done.returncode == 0, done.stderr
    rows = read_rows(tmp_path / "run")
    assert rows[-1]["window"] == 3
    assert all(row["loss"] is not None for row in rows if row["kind"] == "train")


def test_ctrl_c_while_it_starts_ends_it_without_a_word() -> None:
    """In the seconds of imports, where an exception would be a traceback or be lost."""
    command = [sys.executable, "-m", "trainer", "train", "digits"]
    started = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process, seconds in zip(started, (0.4, 0.5), strict=True):
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
    for process in started:
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out, err) == (-signal.SIGINT, "", "")
