"""Promise: a run goes on with its own data and weights, on its own kind of device, or says what differs."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.forked import attempt, replace, small
from tests.helpers.refusals import named, refused
from tests.helpers.run_folders import changed, manifest
from trainer.config.recipe import Recipe
from trainer.data.dataset import ArrayDataset
from trainer.runs.folder import write_json
from trainer.train.components.task import make_task
from trainer.train.model_of_run import open_run
from trainer.train.start import prepare


def test_changed_data_is_refused_and_can_be_forced(tmp_path: Path, stopped: Path) -> None:
    folder = changed(tmp_path / "run", stopped)

    def task_of(recipe: Recipe) -> Any:
        task: Any = make_task(recipe)
        task.evaluation_data.arrays["image"][3, 0, 0, 0] ^= 1
        return task

    other_pixel = lambda: replace(prepare, "make_task", task_of)  # noqa: E731
    ended = attempt(folder, before=other_pixel, code=2)
    assert named(ended.line, "evaluation") and "training" not in ended.line
    attempt(folder, mode="force", before=other_pixel, code=0)


def test_another_kind_of_device_is_refused(tmp_path: Path, stopped: Path) -> None:
    folder = changed(tmp_path / "run", stopped)
    write_json(folder / "manifest.json", {**manifest(folder), "device": {"kind": "cuda"}})
    assert named(attempt(folder, code=2).line, "cuda cpu")


def test_a_fingerprint_tells_arrays_apart() -> None:
    image, label = np.arange(4 * 3, dtype=np.uint8).reshape(4, 3), np.arange(4)
    own = ArrayDataset({"image": image, "label": label}).fingerprint()
    assert own == ArrayDataset({"label": label.copy(), "image": np.asfortranarray(image)}).fingerprint()
    others: list[Any] = [
        {"image": image ^ 1, "label": label},
        {"image": image, "label": label[::-1]},
        {"image": image[:3], "label": label[:3]},
        {"image": image.reshape(4, 1, 3), "label": label},
        {"image": image.view(np.int8), "label": label},
        {"picture": image, "label": label},
    ]
    found = {own, *(ArrayDataset(arrays).fingerprint() for arrays in others)}
    assert len(found) == 1 + len(others)


def test_the_newest_of_the_run_itself_is_taken(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Among its checkpoints is a newer one of a like run, of step 10."""
    mixed, theirs = changed(tmp_path / "ours", stopped), tmp_path / "theirs"
    attempt(theirs, small(seed=1), stop_after=10, code=75)
    shutil.copytree(theirs / "checkpoints/step-00000010", mixed / "checkpoints/step-00000010")
    assert open_run(mixed).weights == "checkpoints/step-00000008/ema.safetensors"
    assert named(capsys.readouterr().err, "step-00000010")
    with refused("step-00000010"):
        open_run(mixed, checkpoint="10")
    assert open_run(mixed, checkpoint="5").weights == "checkpoints/step-00000005/ema.safetensors"
    for step in (5, 8):
        shutil.rmtree(mixed / f"checkpoints/step-0000000{step}")
    with refused("weights"):
        open_run(mixed)
