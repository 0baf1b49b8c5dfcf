"""Data sets by name: embedded digits, synthetic images, and images from folders, tables, shards and packs."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer.config.data import DataConfig, at_home
from trainer.config.formats import FORMATS
from trainer.config.registry import named
from trainer.config.sizes import parse_size
from trainer.data.dataset import ArrayDataset, Dataset
from trainer.data.formats.cifar10 import odd_sizes, open_cifar10
from trainer.data.formats.files import readable
from trainer.data.formats.images import ImageDataset
from trainer.data.formats.labels import alike, shown
from trainer.data.formats.records import Records, reading_of
from trainer.data.formats.sharded import ShardedRecords
from trainer.data.left_out import told
from trainer.data.remote.access import join
from trainer.data.remote.cache import CachedShards, fitting_shards_per_block, open_cached
from trainer.errors import BadInputError
from trainer.rng import Purpose, key, keys

IMAGE = "image"
LABEL = "label"


class ImageData(NamedTuple):
    """Images for training and evaluation, and what the model must know of them.

    Attributes:
        train: Data set with the fields image, uint8 (height, width, channels), and label, int64 ().
        evaluation: The same for evaluation.
        classes: Names of the classes.
        channels: Number of channels.
        mean: Mean of each channel on the scale 0 to 1.
        std: Standard deviation likewise.
        notes: Lines for the user.
    """

    train: Dataset
    evaluation: Dataset
    classes: tuple[str, ...]
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    notes: tuple[str, ...] = ()


def load_images(config: DataConfig, seed: int) -> ImageData:
    """Opens the data set that the configuration names.

    Raises:
        BadInputError: If it isn't there or isn't what it should be.
    """
    if config.name == "digits":
        return _digits()
    if config.name == "synthetic":
        return _synthetic(config, seed)
    path = data_path(config)
    if config.name == "cifar10":
        return _cifar10(Path(path))
    train, evaluation = (open_records(config, path, split) for split in ("train", "val"))
    if isinstance(train, CachedShards) and isinstance(evaluation, CachedShards):
        train.shards_per_block = fitting_shards_per_block(_bytes(config.cache_limit), (train, evaluation))
    classes = common_classes(path, train, evaluation, FORMATS[config.name].gaps)
    # The usual statistics of ImageNet.
    return ImageData(
        _cut(train, config, training=True),
        _cut(evaluation, config, training=False),
        classes,
        channels=3,
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        notes=(*class_notes(classes, train, evaluation), *_of_nobody(classes, train)),
    )


def more_images(config: DataConfig, split: str | None, seed: int) -> tuple[Dataset, tuple[str, ...]]:
    """Images to measure on, and their classes; of what lies in files only this split is opened.

    Args:
        config: Names the data set.
        split: Which part; None: val, or what hf data has to measure on.
        seed: For synthetic images.

    Raises:
        BadInputError: If it isn't there or isn't what it should be.
    """
    if not in_files(config):
        images = load_images(config, seed)
        return images.evaluation, images.classes
    records = open_records(config, data_path(config), split or "val")
    return _cut(records, config, training=False), tuple(records.classes)


def in_files(config: DataConfig) -> bool:
    """Whether images come from files of any size, so that each is cut and resized."""
    return bool(FORMATS[config.name].opens)


def _cut(records: Records, config: DataConfig, training: bool) -> ImageDataset:
    size, crops = config.image_size, (config.crop_area, config.eval_crop)
    return ImageDataset(records, size, training, config.on_corrupt, *crops)


def check_alike(dataset: Dataset, classes: Sequence[str], main: Dataset, known: Sequence[str]) -> None:
    """Makes sure that a model of the main data can be measured on another set.

    Args:
        dataset: The other set.
        classes: Its classes; the last ones may be missing.
        main: What is measured on besides.
        known: The model's classes.

    Raises:
        BadInputError: If classes or samples are others.
    """
    if tuple(classes) != tuple(known[: len(classes)]):
        odd = next((name for name in classes if name not in known), None)
        lost = next((name for name in known if name not in classes), None)
        what = "they stand in another order"
        if odd is not None:
            what = f"'{odd}' is none of the model's"
        elif lost is not None:
            what = f"'{lost}' is missing"
        raise BadInputError(f"has other classes than the model ({len(classes):,} and {len(known):,}): {what}")
    for name, (shape, dtype) in main.fields.items():
        here = dataset.fields.get(name)
        if here != (shape, dtype):
            found = "none" if here is None else f"{here.dtype} {_by(here.shape)}"
            raise BadInputError(
                f"is another kind of data: '{name}' is {found} there, in the main set {dtype} {_by(shape)}"
            )


def _by(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "()"


def data_path(config: DataConfig) -> Path | str:
    """The folder of the data, or its URL.

    Raises:
        BadInputError: If it isn't given, or there is no such folder.
    """
    if config.path is None:
        raise BadInputError(f"data.path is missing: data.name={config.name} needs --set data.path=DIR")
    path = _at_home("path", config.path)
    if isinstance(path, Path):
        check_folder(path)
    return path


def open_records(config: DataConfig, path: Path | str, split: str) -> Records:
    """Opens one split of labeled images, by the format's row in `FORMATS`.

    Args:
        config: Names the format.
        path: From `data_path`; a string if it is a URL.
        split: "train", "val", or another that lies at the path.

    Raises:
        BadInputError: If it isn't there or isn't what it should be.
    """
    if isinstance(path, str):
        assert config.cache is not None
        folder = Path(_at_home("cache", config.cache)).absolute()
        records: Records = open_cached(join(path, split), folder, _bytes(config.cache_limit))
    else:
        records = named(FORMATS[config.name].opens)(config, path, split)
    made = records.reading if isinstance(records, ShardedRecords) else None
    records.reading = reading_of(config, made)
    if isinstance(records, ShardedRecords) and records.decoded and records.reading != made:
        raise BadInputError(
            f"{path}: its images were decoded when it was packed, with another data.exif_orientation or "
            "data.image_bits; leave these at auto, or pack again with --exif-orientation and --image-bits"
        )
    return records


def order_of(dataset: Dataset) -> tuple[tuple[int, ...], int]:
    """Samples of each shard, and of how many shards they are shuffled together; () and 0: of all."""
    records = getattr(dataset, "records", None)
    if isinstance(records, CachedShards) and records.shards_per_block:
        return tuple(records.sizes), records.shards_per_block
    return (), 0


def check_folder(path: Path) -> None:
    """Makes sure that data.path is a folder.

    Raises:
        BadInputError: If it isn't there, or is a file.
    """
    if not path.is_dir():
        what = "isn't a folder, which this data needs" if os.path.lexists(path) else "no such folder"
        raise BadInputError(f"data.path={readable(os.fsencode(path))}: {what}; give the folder that holds it")


def _bytes(size: str | None) -> int | None:
    return None if size is None else parse_size(size)


def _at_home(key: str, path: Path | str) -> Path | str:
    return path if isinstance(path, str) else at_home(path, f"data.{key}")


def common_classes(
    path: Path | str, train: Records, evaluation: Records, gaps: bool = False
) -> tuple[str, ...]:
    """Returns the classes of both parts; where classes are numbers, one part may lack the last.

    Args:
        path: What data.path says.
        train: To learn from.
        evaluation: To measure on.
        gaps: Whether a number may be nobody's label, as in a table.

    Raises:
        BadInputError: If they differ, or a class has nothing to learn from.
    """
    longer, shorter = sorted((tuple(train.classes), tuple(evaluation.classes)), key=len, reverse=True)
    numbers = longer[0] == "0"
    if longer != shorter and not (numbers and longer[: len(shorter)] == shorter):
        alone = [
            (name, part)
            for part, mine, other in (("train", train, evaluation), ("val", evaluation, train))
            for name in sorted(set(mine.classes) - set(other.classes))
        ]
        if not alone:
            raise BadInputError(
                f"{path}: train and val have the same classes in another order; make them again"
            )
        name, part = alone[0]
        more = f" (and {len(alone) - 1:,} more)" if len(alone) > 1 else ""
        if pair := alike(each for each, _ in alone):
            raise BadInputError(
                f"{path}: class {shown(pair[0])} is in one part and {shown(pair[1])} in the other; they look "
                "alike, so name both the same"
            )
        enough = " (an empty folder will do)" if part == "train" and not gaps else ""
        raise BadInputError(
            f"{path}: class '{name}'{more} is in {part} only; add it to the other part{enough}, or remove it"
        )
    learned, measured = (np.bincount(part.labels, minlength=len(longer)) for part in (train, evaluation))
    empty = np.flatnonzero((learned == 0) & ((measured > 0) | (not (numbers and gaps))))
    if empty.size:
        more = f" (and {empty.size - 1:,} more)" if empty.size > 1 else ""
        raise BadInputError(
            f"{path}: class '{longer[empty[0]]}'{more} has no samples in train, and "
            f"{measured[empty].sum():,} in val; add some to learn from, or remove it"
            f"{'; ' if train.left_out else ''}{told(train.left_out)}"
        )
    return longer


def class_notes(classes: Sequence[str], train: Records, evaluation: Records) -> tuple[str, ...]:
    """Lines on what can't be told apart, or isn't measured."""
    notes = list[str]()
    if len(classes) == 1:
        notes.append(
            f"there is one class only ('{classes[0]}'), so that loss and accuracy say nothing; is data.path "
            "one folder too high or too low?"
        )
    empty = np.setdiff1d(train.labels, evaluation.labels)
    if empty.size:
        more = f" (and {empty.size - 1:,} more)" if empty.size > 1 else ""
        notes.append(f"class '{classes[empty[0]]}'{more} has no samples in val, and isn't measured")
    return tuple(notes)


def _of_nobody(classes: tuple[str, ...], train: Records) -> tuple[str, ...]:
    """A line on numbers that are nobody's label; they cost an output each."""
    there = np.unique(train.labels)
    if len(there) == len(classes):
        return ()
    first = classes[np.setdiff1d(np.arange(len(classes)), there)[0]]
    return (
        f"{len(classes) - len(there):,} of {len(classes):,} classes have no samples; the first is '{first}'",
    )


def digits() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """UCI's handwritten digits, its file optdigits.tes: 1797 images of 8 x 8, 17 gray levels.

    E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits (1998), UCI Machine Learning
    Repository, https://doi.org/10.24432/C50P49, CC BY 4.0. A test compares them with scikit-learn's.

    A fifth of them, 360 drawn at random once and for all (whatever the run's seed), is the test set.
    The file is sorted by writer: with its last 360 as the test set, all from writers that the model
    hasn't seen, the task is harder.

    Returns:
        Images, uint8 (n, 8, 8, 1), and labels, int64 (n,): for training, and for testing.
    """
    table = np.loadtxt(Path(__file__).with_name("optdigits.csv.gz"), delimiter=",", dtype=np.int64)
    image = (table[:, :-1] * 15).astype(np.uint8).reshape(-1, 8, 8, 1)
    label = table[:, -1].copy()
    drawn = np.argsort(keys(key(Purpose.SPLIT), np.arange(len(label))))
    train, test = np.sort(drawn[360:]), np.sort(drawn[:360])
    return (image[train], label[train]), (image[test], label[test])


def _digits() -> ImageData:
    train, test = (ArrayDataset({IMAGE: image, LABEL: label}) for image, label in digits())
    return ImageData(
        train,
        test,
        tuple("0123456789"),
        channels=1,
        mean=(0.287,),
        std=(0.354,),
    )


def _cifar10(path: Path) -> ImageData:
    train, evaluation, classes = open_cifar10(path)
    # Of the training images.
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    return ImageData(train, evaluation, classes, channels=3, mean=mean, std=std, notes=odd_sizes(path))


def _synthetic(config: DataConfig, seed: int) -> ImageData:
    """Random images with random labels: for measuring speed, not for learning."""
    random = np.random.Generator(np.random.Philox(key(seed, Purpose.DATA)))
    size = (config.image_size, config.image_size, 3)

    def images(count: int) -> ArrayDataset:
        label = random.integers(0, config.classes, count, dtype=np.int64)
        # A prime number of random bytes, repeated: quick to make, and no two images are the same.
        noise = np.frombuffer(random.bytes(1_048_573), np.uint8)
        return ArrayDataset({IMAGE: np.resize(noise, (count, *size)), LABEL: label})

    return ImageData(
        images(config.samples),
        images(max(1, config.samples // 8)),
        tuple(str(number) for number in range(config.classes)),
        channels=3,
        mean=(0.5,) * 3,
        std=(0.29,) * 3,
    )
