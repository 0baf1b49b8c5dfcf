"""Promise: a run goes on with its own data, on its own kind of device, or says what differs."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.forked import attempt, replace
from tests.helpers.refusals import named
from tests.helpers.run_folders import changed
from trainer.config.recipe import Recipe
from trainer.data.dataset import ArrayDataset
from trainer.runs.folder import write_json
from trainer.train.components.task import make_task

# The data and the device are part of a run.


def test_changed_data_is_refused_and_can_be_forced(tmp_path: Path, stopped: Path) -> None:
    folder = changed(tmp_path / "run", stopped)

    def other_pixel() -> None:
        from trainer.train.start import prepare as module

        def task_of(recipe: Recipe) -> Any:
            task: Any = make_task(recipe)
            task.evaluation_data.arrays["image"][3, 0, 0, 0] ^= 1
            return task

        replace(module, "make_task", task_of)

    refused = attempt(folder, before=other_pixel, code=2)
    assert named(refused.line, "evaluation") and "training" not in refused.line
    attempt(folder, mode="force", before=other_pixel, code=0)


def test_another_kind_of_device_is_refused(tmp_path: Path, stopped: Path) -> None:
    folder = changed(tmp_path / "run", stopped)
    manifest = json.loads((folder / "manifest.json").read_text())
    write_json(folder / "manifest.json", {**manifest, "device": {"kind": "cuda"}})
    refused = attempt(folder, code=2)
    assert named(refused.line, "cuda cpu")


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
