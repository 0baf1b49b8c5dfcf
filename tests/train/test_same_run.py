"""Promise: a run goes on with its own data, on its own kind of device, or says what differs."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.few_pictures import make_folder
from tests.helpers.forked import attempt, replace
from tests.helpers.refusals import named
from tests.helpers.run_folders import changed
from trainer.config.recipe import Recipe
from trainer.data import dataset
from trainer.data.dataset import ArrayDataset, spread
from trainer.data.formats.files import in_folder
from trainer.runs.folder import (
    write_json,
)
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

    refused = attempt(folder, before=other_pixel)
    assert refused.code == 2
    assert "(evaluation data: 8 samples " in refused.line and "training data" not in refused.line
    assert attempt(folder, mode="force", before=other_pixel).code == 0
    newest = max((folder / "checkpoints").iterdir())
    state = json.loads((newest / "state.json").read_text())["state"]
    assert state["fingerprint"].keys() == {"training data", "evaluation data", "order"}


def test_another_kind_of_device_is_refused(tmp_path: Path, stopped: Path) -> None:
    folder = changed(tmp_path / "run", stopped)
    manifest = json.loads((folder / "manifest.json").read_text())
    write_json(folder / "manifest.json", {**manifest, "device": {"kind": "cuda"}})
    refused = attempt(folder)
    assert refused.code == 2 and named(refused.line, "cuda cpu")
    assert attempt(folder, mode="force").code == 0


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


def test_a_fingerprint_of_many_bytes_reads_few_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    large = np.zeros((1 << 16, 1 << 14), np.uint8)  # 1 GiB, of which hardly a page is ever made
    rows = 0

    def counted(count: int, budget: int) -> Any:
        nonlocal rows
        found = spread(count, budget)
        rows += len(found)
        return found

    monkeypatch.setattr(dataset, "spread", counted)
    first = ArrayDataset({"x": large}).fingerprint()
    assert 0 < rows * large.shape[1] <= 1 << 25
    large[-1, -1] = 1
    assert ArrayDataset({"x": large}).fingerprint() != first, "the ends belong to what is hashed"


def test_a_fingerprint_tells_folders_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_folder(tmp_path / "data") / "train"

    def fingerprint() -> str:
        return in_folder(root).fingerprint()

    own = fingerprint()
    moved = Path(shutil.copytree(root, tmp_path / "moved"))
    assert in_folder(moved).fingerprint() == own, "wherever it lies"
    first = min(root.rglob("*.png"))
    data = first.read_bytes()
    first.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    other_content = fingerprint()
    first.write_bytes(data + b"\0")
    monkeypatch.setattr("trainer.data.formats.files.CONTENTS", 0)
    without_content = fingerprint()
    first.write_bytes(data)
    other_size = fingerprint()
    first.rename(first.with_name("renamed.png"))
    other_name = fingerprint()
    assert len({own, other_content, without_content, other_size, other_name}) == 5
