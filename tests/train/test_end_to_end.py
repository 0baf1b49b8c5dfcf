"""Promise: one command trains on real data; the run folder holds everything, and a first try leaves none."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml

from tests.helpers import preloaded
from tests.helpers.refusals import named, refusal
from tests.helpers.rows import read_rows
from tests.helpers.run_folders import manifest
from trainer.cli import main
from trainer.config.data import DataConfig
from trainer.config.model import ModelConfig
from trainer.config.recipe_file import load_recipe, recipe_names
from trainer.data.sources import load_images
from trainer.models.images import build_model
from trainer.train.options import fast_settings

ROOT = Path(__file__).parents[2]


def trained(folder: Path, *words: str, code: int = 0, **environment: str) -> list[Path]:
    """The run folders that a command made."""
    command = [sys.executable, "-m", "trainer", "train", "digits", *words]
    done = preloaded.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT), **environment})
    assert done.returncode == code, done.stderr
    return [path for path in folder.glob("runs/*") if not path.is_symlink()]


@pytest.mark.slow
def test_digits_reach_98_percent(tmp_path: Path) -> None:
    assert read_rows(trained(tmp_path)[0])[-1]["accuracy"] >= 0.98


def test_all_of_a_run_is_in_its_folder(tmp_path: Path) -> None:
    (folder,) = trained(tmp_path, "epochs=2", "data.micro_batch_size=32", "parallel.threads=1")
    assert re.fullmatch(r"digits-[0-9a-f]{8}-1", folder.name)
    end = read_rows(folder)[-1]
    assert end["kind"] == "end"
    assert end["accuracy"] >= 0.75, "0.87 after two passes; all thirty come to 0.98"
    facts = manifest(folder)
    assert (facts["status"], facts["steps_done"]) == ("finished", end["step"])
    assert facts["summary"]["accuracy"] == end["accuracy"]
    assert facts["data"]["classes"] == list("0123456789")
    assert (facts["data"]["mean"], facts["data"]["std"]) == ([0.287], [0.354])
    assert yaml.safe_load((folder / "config.yaml").read_text()) == facts["config"]
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    # The weights are plain safetensors, and the averaged ones are those that were measured.
    config = ModelConfig(**facts["config"]["model"])
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
    loss = torch.nn.functional.cross_entropy(scores, labels)
    assert float(loss) == pytest.approx(read_rows(folder, ("eval",))[-1]["loss"], rel=1e-3)


INTERRUPTED = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(("module", "code"), [("pydantic", -signal.SIGINT), ("numpy", 1)])
def test_ctrl_c_while_it_imports_ends_it_at_once(tmp_path: Path, module: str, code: int) -> None:
    """In the launcher, which leaves without a word, or in the rank; an exception would be a traceback."""
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED)
    words = [sys.executable, "-m", "trainer", "train", "digits"]
    how: Any = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 300}
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "INTERRUPT_AT": module}
    ended = subprocess.run(words, check=False, env=environment, **how)
    assert (ended.returncode, ended.stdout) == (code, "")
    said = ended.stderr.splitlines()
    assert said == [] if code < 0 else len(said) == 1 and named(said[0], "SIGINT")


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_can_be_tried(name: str) -> None:
    whole = load_recipe(name, [])
    tried = load_recipe(name, fast_settings(whole))
    assert (tried.max_steps, tried.data.limit) == (1, whole.data.global_batch_size)


@pytest.mark.parametrize(("lr", "code"), [("0.1", 0), ("1e38", 1)])
def test_a_fast_try_leaves_nothing_unless_it_failed(tmp_path: Path, lr: str, code: int) -> None:
    (tmp_path / "tmp").mkdir()
    words = ("--fast-dev-run", "parallel.threads=1", "seed=4", f"optim.lr={lr}")
    trained(tmp_path, *words, TMPDIR=str(tmp_path / "tmp"), code=code)
    assert [path.name for path in tmp_path.iterdir()] == ["tmp"]
    assert len([*(tmp_path / "tmp").glob("trainer-try-*/run/report.html")]) == code


@pytest.mark.parametrize(
    ("typed", "meant"), [("--fast_dev_run=1", "--fast-dev-run"), ("--ckpt_path", "--resume")]
)
def test_the_flags_of_others_lead_to_ours(typed: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "digits", typed])
    refusal(int(str(ended.value)), capsys.readouterr().err, meant)


def test_of_a_run_that_stays_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["train", "digits", "--fast-dev-run", "--out", "x"])
    refusal(code, capsys.readouterr().err, "--fast-dev-run --out")
