"""CIFAR-10's binary version (Krizhevsky, 2009): five training files and one test file.

The Python version holds pickles, which aren't read.
"""

from pathlib import Path

import numpy as np

from trainer.data.dataset import ArrayDataset
from trainer.data.formats.files import unlisted
from trainer.errors import BadInputError, reading

_TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_TEST = ("test_batch.bin",)
_SIDE, _CLASSES = 32, 10
_IMAGES = 10_000  # of each file
_RECORD = 1 + 3 * _SIDE * _SIDE


def open_cifar10(folder: Path) -> tuple[ArrayDataset, ArrayDataset, tuple[str, ...]]:
    """Reads CIFAR-10 into memory, 184 MB.

    Args:
        folder: Folder of the files, or of cifar-10-batches-bin.

    Returns:
        Training set and test set, with the fields image, uint8 (32, 32, 3), and label, int64 (); and the
        class names.

    Raises:
        BadInputError: If a file is missing or truncated, or holds an invalid label.
    """
    folder = _inner(folder)
    if not (folder / _TRAIN[0]).exists() and (folder / "data_batch_1").exists():
        raise BadInputError(
            f"{folder}: is CIFAR-10's Python version, which is pickled; get the binary version"
        )
    train, test = (_read([folder / name for name in names]) for names in (_TRAIN, _TEST))
    more = unlisted("file{s} that CIFAR-10 doesn't have", folder, (".bin",), (*_TRAIN, *_TEST), deep=False)
    train.left_out = tuple(more)
    return train, test, _names(folder / "batches.meta.txt")


def _inner(folder: Path) -> Path:
    inner = folder / "cifar-10-batches-bin"
    return inner if inner.is_dir() else folder


def odd_sizes(folder: Path) -> tuple[str, ...]:
    """Returns a note on files with fewer or more images than CIFAR-10's."""
    folder = _inner(folder)
    sizes = {name: (folder / name).stat().st_size // _RECORD for name in (*_TRAIN, *_TEST)}
    odd = [name for name, images in sizes.items() if images != _IMAGES]
    if not odd:
        return ()
    more = f", and {len(odd) - 1} more of 6 files have others, too" if len(odd) > 1 else ""
    return (f"{odd[0]} holds {sizes[odd[0]]:,} images, and CIFAR-10's {_IMAGES:,}{more}: a part, or cut?",)


def _read(files: list[Path]) -> ArrayDataset:
    parts = []
    for file in files:
        with reading(file, "give the folder of CIFAR-10's binary version"):
            data = np.fromfile(file, np.uint8)
        records, rest = divmod(len(data), _RECORD)
        if rest or not records:
            raise BadInputError(f"{file}: {len(data)} bytes are no whole number of images; get it again")
        table = data.reshape(records, _RECORD)
        if (wrong := np.flatnonzero(table[:, 0] >= _CLASSES)).size:
            raise BadInputError(
                f"{file}: image {wrong[0]} has label {table[wrong[0], 0]}, and there are {_CLASSES} classes"
            )
        if not table[-1].any():
            raise BadInputError(f"{file}: its last image is zeros, as where a copy was cut off; get it again")
        parts.append(table)
    table = np.concatenate(parts)
    planes = table[:, 1:].reshape(-1, 3, _SIDE, _SIDE)
    image = np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
    return ArrayDataset({"image": image, "label": table[:, 0].astype(np.int64)})


def _names(file: Path) -> tuple[str, ...]:
    try:
        names = tuple(file.read_text("utf-8").split())
    except (OSError, UnicodeDecodeError):
        names = ()
    return names if len(names) == _CLASSES else tuple(map(str, range(_CLASSES)))
