"""Promise: one command trains on real data, on one rank or several; the run folder holds everything."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import yaml

from tests.helpers import preloaded
from tests.helpers.few_pictures import write_pictures
from tests.helpers.ports import free_port
from tests.helpers.refusals import named, refusal
from tests.helpers.rows import read_rows
from trainer.config.data import DataConfig
from trainer.config.model import ModelConfig
from trainer.data.sources import load_images
from trainer.models.images import build_model

ROOT = Path(__file__).parents[2]
QUICK = ["--set", "epochs=2", "--set", "data.micro_batch_size=32", "--set", "parallel.threads=1"]
SMALLER = [*QUICK, *("--set", "model.width=4", "--set", "max_steps=6", "--set", "log.every=2")]


def run(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return preloaded.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT), **environment})


def trainer(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(folder, sys.executable, "-m", "trainer", *arguments, **environment)


def settings(*words: str) -> list[str]:
    return [part for word in words for part in ("--set", word)]


@pytest.mark.slow
def test_digits_reach_98_percent(tmp_path: Path) -> None:
    done = trainer(tmp_path, "train", "digits")
    assert done.returncode == 0, done.stderr
    (folder,) = (path for path in (tmp_path / "runs").iterdir() if not path.is_symlink())
    assert read_rows(folder)[-1]["accuracy"] >= 0.98


def test_all_of_a_run_is_in_its_folder_and_a_second_is_the_same(tmp_path: Path) -> None:
    done = trainer(tmp_path, "train", "digits", *QUICK)
    assert done.returncode == 0, done.stderr
    # But for the one line of a run in a container's own file system, where these tests may run as well.
    assert not [line for line in done.stderr.splitlines() if "lies in the container itself" not in line]
    (folder,) = (path for path in (tmp_path / "runs").iterdir() if not path.is_symlink())
    assert re.fullmatch(r"digits-[0-9a-f]{8}-1", folder.name)
    end = read_rows(folder)[-1]
    assert end["kind"] == "end"
    assert end["accuracy"] >= 0.75, "0.87 after two passes; all thirty come to 0.98"
    assert f"accuracy     {end['accuracy']:.4f}" in done.stdout
    assert f"run folder   runs/{folder.name}" in done.stdout
    assert "samples/s" in done.stdout
    look_into(folder, end)

    second = run_whose_reader_leaves(tmp_path)
    assert (second.name[:-1], second.name[-1]) == (folder.name[:-1], "2")
    losses = [[row.get("loss") for row in read_rows(one)] for one in (folder, second)]
    assert losses[0] == losses[1], "the same configuration is the same run"
    for name in ("model", "ema"):
        one, other = ((each / f"{name}.safetensors").read_bytes() for each in (folder, second))
        assert one == other, name


def look_into(folder: Path, end: dict[str, Any]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["status"] == "finished"
    assert manifest["summary"]["accuracy"] == end["accuracy"]
    assert manifest["steps_done"] == end["step"]
    assert manifest["data"]["classes"] == list("0123456789")
    assert (manifest["data"]["mean"], manifest["data"]["std"]) == ([0.287], [0.354])
    assert yaml.safe_load((folder / "config.yaml").read_text()) == manifest["config"]
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    # The weights are plain safetensors, and the averaged ones are those that were measured.
    config = ModelConfig(**manifest["config"]["model"])
    for name in ("model", "ema"):
        model = build_model(config, 1, 10)
        model.load_state_dict(safetensors.torch.load_file(folder / f"{name}.safetensors"))
    images: Any = load_images(DataConfig(), 0)
    pixels = torch.from_numpy(images.evaluation.arrays["image"]).permute(0, 3, 1, 2)
    pixels = (pixels.float() / 255 - 0.287) / 0.354
    labels = torch.from_numpy(images.evaluation.arrays["label"]).long()
    with torch.inference_mode():
        scores = model.eval()(pixels)
    assert float((scores.argmax(1) == labels).float().mean()) == pytest.approx(end["accuracy"], abs=1.5 / 360)
    evaluation = [row for row in read_rows(folder) if row["kind"] == "eval"][-1]
    loss = torch.nn.functional.cross_entropy(scores, labels)
    assert float(loss) == pytest.approx(evaluation["loss"], rel=1e-3)


def run_whose_reader_leaves(folder: Path) -> Path:
    """As `| head -1` does; it goes on to its end without one. Returns the run's folder."""
    words = [sys.executable, "-u", "-m", "trainer", "train", "digits", *QUICK]
    there = set((folder / "runs").iterdir())
    with preloaded.Popen(
        words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read()
        assert process.wait(300) == 0, said
    (new,) = set((folder / "runs").iterdir()) - there
    return new


def test_two_ranks_and_torchrun_are_the_same_thing(tmp_path: Path) -> None:
    done = trainer(tmp_path, "train", "digits", "--nproc-per-node", "2", "--out", "mine", *SMALLER)
    assert done.returncode == 0, done.stderr
    assert "2 x CPU" in done.stdout
    assert "Gloo" not in done.stdout
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--master-port={free_port()}",
        "--nproc-per-node=2",
    ]
    done = run(tmp_path, *torchrun, "-m", "trainer", "train", "digits", *SMALLER)
    assert done.returncode == 0, done.stderr
    (folder,) = (path for path in (tmp_path / "runs").iterdir() if path.is_dir() and not path.is_symlink())
    assert json.loads((folder / "manifest.json").read_text())["world_size"] == 2
    ours, theirs = (read_rows(path) for path in (tmp_path / "mine", folder))
    assert [row.get("loss") for row in ours] == [row.get("loss") for row in theirs]


@pytest.mark.slow
def test_the_sharded_recipe_trains_on_token_files(tmp_path: Path) -> None:
    """At a small width, on two ranks; compiled code is the subject of others."""
    (tmp_path / "tokens").mkdir()
    for name in ("train", "val"):
        file = np.resize(np.arange(60, dtype=np.uint16), 2000)
        file.tofile(tmp_path / "tokens" / f"{name}.bin")
    sizes = "data.global_batch_size=8", "data.micro_batch_size=2"
    little = settings("data.path=tokens", *sizes, "max_steps=12")
    narrow = settings(*(f"language.{key}" for key in ("width=50", "layers=3", "sequence_length=16")))
    quick = settings("optim.lr=0.01", "optim.warmup_steps=2", "compile.mode=none", "parallel.threads=1")
    quick += settings("language.vocabulary=64", "language.dtype=uint16", "log.every=1")
    words = ("train", "gpt2-1.5b", "--nproc-per-node", "2", "--out", "run", *little, *narrow, *quick)
    done = trainer(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert "sharded over 2 ranks: 3 blocks are gathered one by one, the rest" in done.stdout
    losses = [row["loss"] for row in read_rows(tmp_path / "run") if row["kind"] == "train"]
    assert 4 < losses[0] < 4.3, "about the logarithm of 64"
    assert losses[-1] < losses[0] - 0.5
    whole = safetensors.torch.load_file(tmp_path / "run" / "model.safetensors")
    assert whole["embedding.weight"].shape == (64, 50)


BROKEN = """
import sys, trainer.train.components.task, trainer.tasks.classification as c
original, calls = c.Classification.loss, []
def loss(self, model, batch):
    import os
    calls.append(0)
    if os.environ["RANK"] == "1" and len(calls) == 5:
        raise RuntimeError("the fifth micro-batch of rank 1")
    return original(self, model, batch)
c.Classification.loss = loss
"""


def test_a_rank_that_raises_takes_the_job_down(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nif 'RANK' in os.environ and 'WORLD_SIZE' in os.environ:\n"
        + "".join(f"    {line}\n" for line in BROKEN.strip().splitlines())
        + "else:\n    from trainer.launch import launcher\n    launcher._AFTER_FAILURE_SECONDS = 300.0\n"
    )
    done = trainer(
        tmp_path, "train", "digits", "--nproc-per-node", "2", *SMALLER, PYTHONPATH=f"{tmp_path}:{ROOT}"
    )
    assert done.returncode == 1
    assert named(done.stderr, "RuntimeError 1")
    assert done.stderr.count("Traceback") == 1
    manifest = next((tmp_path / "runs").glob("*/manifest.json"))
    assert json.loads(manifest.read_text())["status"] == "failed"


def test_a_run_that_diverges_says_so(tmp_path: Path) -> None:
    wild = settings("optim.lr=1e30", "optim.max_grad_norm=0")
    done = trainer(tmp_path, "train", "digits", "--out", "run", *SMALLER, *wild)
    assert done.returncode == 1
    assert "isn't finite; lower optim.lr" in done.stderr and "Traceback" not in done.stderr
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["status"] == "diverged"


def test_bad_data_found_by_the_ranks_is_one_line(tmp_path: Path) -> None:
    data = write_pictures(tmp_path / "data")
    for image in (data / "train").rglob("*.png"):
        image.write_bytes(image.read_bytes()[:200])
    words = settings(
        "data.name=folder", f"data.path={data}", "data.image_size=16", "data.global_batch_size=4"
    )
    words += settings("data.micro_batch_size=2", "data.augment=none", "data.workers=1", "parallel.threads=1")
    done = trainer(tmp_path, "train", "digits", "--nproc-per-node", "2", *words)
    refusal(done.returncode, done.stderr, f"{data / 'train'}", ".png")


def test_synthetic_resnet_runs_without_data(tmp_path: Path) -> None:
    words = settings(
        "model.name=resnet18", "data.image_size=32", "data.samples=16", "data.global_batch_size=4"
    )
    words += settings("data.micro_batch_size=2", "data.classes=10", "max_steps=2", "log.every=1")
    words += settings("parallel.threads=1")
    done = trainer(tmp_path, "train", "resnet50-synthetic", "--out", "run", *words)
    assert done.returncode == 0, done.stderr
    rows = read_rows(tmp_path / "run")
    assert rows[-1]["step"] == 2
    assert all(row["loss"] is not None for row in rows if row["kind"] == "train")


INTERRUPTED = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(("module", "code"), [("pydantic", -signal.SIGINT), ("numpy", 1), ("torch.nn", 1)])
def test_ctrl_c_while_it_imports_ends_it_at_once(tmp_path: Path, module: str, code: int) -> None:
    """In the launcher, which leaves without a word, or in the rank; an exception would be a traceback."""
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED)
    ended = subprocess.run(
        [sys.executable, "-m", "trainer", "train", "digits"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "INTERRUPT_AT": module},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (code, "")
    said = ended.stderr.splitlines()
    assert said == [] if code < 0 else len(said) == 1 and named(said[0], "SIGINT")
