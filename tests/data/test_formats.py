"""Promise: a format of data is one file and one row, by CONTRIBUTING.md."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.helpers.batches import read_all
from tests.helpers.refusals import named, refused
from tests.helpers.toys import build_alone, make_recipe
from trainer.config.data import DataConfig
from trainer.config.formats import FORMATS, Format, described_formats, formats_of
from trainer.data.formats.cifar10 import open_cifar10
from trainer.data.formats.files import Files, in_folder
from trainer.data.sources import load_images
from trainer.train.components.task import make_task


class NpyFiles(Files):
    """Images that numpy saved: uint8 (height, width, 3)."""

    raw = True

    def shape(self, sample: int) -> tuple[int, int]:
        height, width, _ = np.load(self.name(sample)).shape
        return height, width

    def rows(self, sample: int, top: int, height: int) -> npt.NDArray[np.uint8]:
        image: npt.NDArray[np.uint8] = np.load(self.name(sample))[top : top + height]
        return image


def opened(config: DataConfig, path: Path, split: str) -> Files:  # noqa: ARG001
    return in_folder(path / split, (".npy",), kind=NpyFiles)


def test_a_format_is_one_file_and_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("npy_format")
    module.opened = opened
    monkeypatch.setitem(sys.modules, "npy_format", module)
    row = Format(("classification",), "images by numpy", splits=True, opens="npy_format:opened", gaps=False)
    monkeypatch.setitem(FORMATS, "npy", row)
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            (tmp_path / split / label).mkdir(parents=True)
            for number in range(4):
                image = np.full((20, 24, 3), 40 * number + 9 * (label == "dog"), np.uint8)
                np.save(tmp_path / split / label / f"{number}.npy", image)
    assert formats_of("classification")[-1] == "npy" and "npy (images by numpy)" in described_formats()
    recipe = make_recipe(data={"image_size": 16, "global_batch_size": 4, "micro_batch_size": 2})
    data = recipe.data.model_copy(update={"name": "npy", "path": tmp_path})
    task, seen = make_task(recipe.model_copy(update={"data": data})), []
    for workers in (0, 1):
        run = build_alone(recipe, task, workers)
        seen.append(read_all(run.loader, run.share.batches(0)))
        run.close()
    assert seen[0] == seen[1] and len(seen[0]) == 4


FILES = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]


def write(folder: Path) -> npt.NDArray[np.uint8]:
    """Twelve images, two in each file: uint8 (12, 3073) as they lie there."""
    table = np.random.default_rng(0).integers(0, 256, (12, 3073)).astype(np.uint8)
    table[:, 0] = np.arange(12) % 10
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(FILES):
        table[2 * number : 2 * number + 2].tofile(folder / name)
    return table


@pytest.mark.parametrize("inner", ["", "cifar-10-batches-bin"])
def test_every_pixel_and_label(inner: str, tmp_path: Path) -> None:
    table = write(tmp_path / inner)
    (tmp_path / inner / "batches.meta.txt").write_text("\n".join("abcdefghij") + "\n\n")
    data = load_images(DataConfig(name="cifar10", path=tmp_path), 0)
    assert (len(data.train), data.classes, data.channels) == (10, tuple("abcdefghij"), 3)
    assert len(data.notes) == 1 and named(data.notes[0], "data_batch_1.bin 2 10,000 5 6")
    arrays = data.evaluation.arrays
    assert arrays is not None and arrays["label"].tolist() == [0, 1]
    assert np.array_equal(arrays["image"], table[10:, 1:].reshape(2, 3, 32, 32).transpose(0, 2, 3, 1))


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    with refused(tmp_path):
        open_cifar10(tmp_path)
    (tmp_path / "data_batch_1").write_bytes(b"pickled")
    with refused(tmp_path, "pickled binary"):
        open_cifar10(tmp_path)
    table = write(tmp_path)
    table[3, 0] = 10
    for content, names in ((table[2:4].tobytes(), "1 10"), (table[4:6].tobytes()[:-9], "6137")):
        (tmp_path / "data_batch_2.bin").write_bytes(content)
        with refused(tmp_path / "data_batch_2.bin:", names):
            open_cifar10(tmp_path)
