"""Promise: CIFAR-10's binary version is read as it was written; what is wrong with it is said."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from trainer.data.formats.cifar10 import open_cifar10
from trainer.errors import BadInputError

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
    train, test, classes = open_cifar10(tmp_path)
    assert (len(train), len(test), classes) == (10, 2, tuple("abcdefghij"))
    arrays = test.arrays
    assert arrays is not None
    assert arrays["label"].tolist() == [0, 1]
    for sample, row in enumerate(table[10:]):
        red_of_the_second_line = row[1 + 32 : 1 + 64]
        assert np.array_equal(arrays["image"][sample, 1, :, 0], red_of_the_second_line)
        assert np.array_equal(arrays["image"][sample, 0, :, 2], row[1 + 2048 : 1 + 2048 + 32])


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="can't be read"):
        open_cifar10(tmp_path)
    (tmp_path / "data_batch_1").write_bytes(b"pickled")
    with pytest.raises(BadInputError, match="which is pickled; get the binary version"):
        open_cifar10(tmp_path)
    table = write(tmp_path)
    table[3, 0] = 10
    table[2:4].tofile(tmp_path / "data_batch_2.bin")
    with pytest.raises(BadInputError, match=r"data_batch_2.bin: image 1 has label 10"):
        open_cifar10(tmp_path)
    (tmp_path / "data_batch_2.bin").write_bytes(b"torn")
    with pytest.raises(BadInputError, match="4 bytes are no whole number of images"):
        open_cifar10(tmp_path)
