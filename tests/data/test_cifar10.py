"""Promise: CIFAR-10's binary version is read as it was written; what is wrong with it is said."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tests.helpers.refusals import named, refused
from trainer.config.data import DataConfig
from trainer.data.formats.cifar10 import open_cifar10
from trainer.data.sources import load_images

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
    for content, names in ((table[2:4].tobytes(), "1 10"), (b"torn", "4")):
        (tmp_path / "data_batch_2.bin").write_bytes(content)
        with refused(tmp_path / "data_batch_2.bin:", names):
            open_cifar10(tmp_path)
