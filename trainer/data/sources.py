"""Image data sets by data.name: embedded digits, synthetic, CIFAR-10, folders, tables, shards, packs."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from trainer.config.data import DataConfig, at_home
from trainer.config.formats import FORMATS
from trainer.config.registry import named
from trainer.config.sizes import parse_size
from trainer.data.dataset import ArrayDataset, Dataset
from trainer.data.formats.cifar10 import odd_sizes, open_cifar10
from trainer.data.formats.files import readable
from trainer.data.formats.images import ImageDataset
from trainer.data.formats.labels import alike, joined_classes, quoted
from trainer.data.formats.records import LABEL, Records, is_upright
from trainer.data.formats.sharded import ShardedRecords
from trainer.data.left_out import left_out_line
from trainer.data.remote.access import join
from trainer.data.remote.cache import CachedShards, fitting_shards_per_block, open_cached
from trainer.errors import BadInputError
from trainer.rng import Ints, Purpose, key, keys

IMAGE = "image"
_MOST_COMPARED = 10_000_000  # samples whose files or contents are compared with each other

R = TypeVar("R", bound=Records)


class ImageData(NamedTuple):
    """Images for training and evaluation, and what the model needs to know about them.

    Attributes:
        train: Data set with the fields image, uint8 (height, width, channels), and label, int64 ().
        evaluation: Data set of the same fields.
        classes: Names of the classes.
        channels: Number of channels.
        mean: Mean of each channel on the scale 0 to 1.
        std: Standard deviation of each channel on the same scale.
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
    """Opens the images that data.name and data.path say.

    Raises:
        BadInputError: If they are missing or malformed.
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
    classes, evaluation = common_classes(path, train, evaluation, FORMATS[config.name].gaps)
    # The usual statistics of ImageNet.
    return ImageData(
        _cut(train, config, training=True),
        _cut(evaluation, config, training=False),
        classes,
        channels=3,
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        notes=(
            *class_notes(classes, train, evaluation),
            *twin_notes(train, evaluation),
            *_notes(config, classes, train),
        ),
    )


def more_images(config: DataConfig, split: str | None, seed: int) -> tuple[Dataset, tuple[str, ...]]:
    """Opens one split of images for evaluation and returns it with its classes; other splits aren't opened.

    Args:
        config: Names the data set.
        split: Name of the split; None: "val", or data.eval_split of hf data.
        seed: Seed of synthetic images.

    Raises:
        BadInputError: If the split is missing or malformed.
    """
    if not in_files(config):
        images = load_images(config, seed)
        return images.evaluation, images.classes
    records = open_records(config, data_path(config), split or "val")
    return _cut(records, config, training=False), tuple(records.classes)


def in_files(config: DataConfig) -> bool:
    """True if images are files of any size, which are cropped and resized."""
    return bool(FORMATS[config.name].opens)


def _cut(records: Records, config: DataConfig, training: bool) -> ImageDataset:
    size, crops = config.image_size, (config.crop_area, config.eval_crop)
    return ImageDataset(records, size, training, config.on_corrupt, *crops)


def check_alike(dataset: Dataset, classes: Sequence[str], main: Dataset, known: Sequence[str]) -> None:
    """Checks that a model of the main data can be evaluated on another set, and numbers its classes alike.

    Args:
        dataset: The other set.
        classes: Its classes, which are among the model's.
        main: The main evaluation set.
        known: The model's classes.

    Raises:
        BadInputError: If it has other classes or fields.
    """
    if odd := [name for name in classes if name not in set(known)]:
        raise BadInputError(
            f"has other classes than the model ({len(classes):,} and {len(known):,}): '{odd[0]}' is none of "
            "the model's"
        )
    several = getattr(getattr(dataset, "records", None), "sets", None) is not None
    if several or tuple(classes) != tuple(known[: len(classes)]):
        if (number_by := getattr(dataset, "number_by", None)) is None:
            raise BadInputError("has its classes in another order than the model, and can't be renumbered")
        number_by(known)
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
    """Returns data.path, a folder or a URL.

    Raises:
        BadInputError: If it isn't given or there is no such folder.
    """
    if config.path is None:
        raise BadInputError(f"data.path is missing: data.name={config.name} needs data.path=DIR")
    path = _at_home("path", config.path)
    if isinstance(path, Path):
        check_folder(path, config.name)
    return path


def open_records(config: DataConfig, path: Path | str, split: str) -> Records:
    """Opens one split of labeled images, by the format's row in `FORMATS`.

    Args:
        config: Names the format.
        path: From `data_path`; a string if it is a URL.
        split: "train", "val", or another split at the path.

    Raises:
        BadInputError: If the split is missing or malformed.
    """
    if isinstance(path, str):
        assert config.cache is not None
        folder = Path(_at_home("cache", config.cache)).absolute()
        records: Records = open_cached(join(path, split), folder, _bytes(config.cache_limit))
    else:
        records = named(FORMATS[config.name].opens)(config, path, split)
    if not isinstance(records, ShardedRecords):
        records.keep_hashes(config.index)
    made = records.upright if isinstance(records, ShardedRecords) else None
    records.upright = is_upright(config, made)
    if isinstance(records, ShardedRecords) and records.decoded and records.upright != made:
        raise BadInputError(
            f"{path}: its images were decoded when it was packed, with another data.exif_orientation; leave "
            "it at auto, or pack again with --exif-orientation"
        )
    return records


def order_of(dataset: Dataset) -> tuple[tuple[int, ...], int]:
    """Returns the samples of each shard and the shards per shuffle block; () and 0 to shuffle all samples."""
    records = getattr(dataset, "records", None)
    if isinstance(records, CachedShards) and records.shards_per_block:
        return tuple(records.sizes), records.shards_per_block
    return (), 0


def check_folder(path: Path, name: str) -> None:
    """Checks that data.path is a folder, for data of this name.

    Raises:
        BadInputError: If it doesn't exist or is a file.
    """
    if not path.is_dir():
        what = "isn't a folder, which this data needs" if os.path.lexists(path) else "no such folder"
        raise BadInputError(
            f"data.path={readable(os.fsencode(path))}: {what}; give the folder of data.name={name} "
            f"({FORMATS[name].about})"
        )


def _bytes(size: str | None) -> int | None:
    return None if size is None else parse_size(size)


def _at_home(key: str, path: Path | str) -> Path | str:
    return path if isinstance(path, str) else at_home(path, f"data.{key}")


def common_classes(
    path: Path | str, train: Records, evaluation: R, gaps: bool = False
) -> tuple[tuple[str, ...], R]:
    """Returns the classes, which are those of the training split, and the evaluation split numbered by them.

    Args:
        path: data.path, for messages.
        train: Training split.
        evaluation: Evaluation split, which may lack classes.
        gaps: True if a class number may have no samples at all, as in a table.

    Raises:
        BadInputError: If a class has no training samples, or can hardly be told from another.
    """
    classes = tuple(train.classes)
    unlearned = strangers(evaluation, classes, gaps)
    for names in (classes, evaluation.classes, (*classes, *unlearned)):
        if pair := alike(names):
            raise BadInputError(
                f"{path}: class {quoted(pair[0])} can hardly be told from class {quoted(pair[1])}"
                f"{'' if {*pair} <= {*names[: len(classes)]} else ' of the other part'}; make them one"
            )
    if unlearned:
        more = f" (and {len(unlearned) - 1:,} more)" if len(unlearned) > 1 else ""
        raise BadInputError(
            f"{path}: class '{unlearned[0]}'{more} is in val only; add samples of it to train, or remove it"
        )
    evaluation = evaluation.numbered_by(classes)
    learned, measured = (_counts(part, classes) for part in (train, evaluation))
    empty = np.flatnonzero((learned == 0) & ((measured > 0) | (not (classes[0] == "0" and gaps))))
    if empty.size:
        more = f" (and {empty.size - 1:,} more)" if empty.size > 1 else ""
        raise BadInputError(
            f"{path}: class '{classes[empty[0]]}'{more} has no samples in train, and "
            f"{measured[empty].sum():,} in val; add some to learn from, or remove it"
            f"{'; ' if train.left_out else ''}{left_out_line(train.left_out)}"
        )
    return classes, evaluation


def _counts(part: Records, classes: Sequence[str]) -> Ints:
    counts = part.counts()
    return np.pad(counts, (0, len(classes) - len(counts)))


def strangers(records: Records, known: Sequence[str], gaps: bool = False) -> list[str]:
    """Returns the classes that aren't known; with `gaps` not numbers without samples."""
    used, among = records.counts() > 0, set(known)
    return [
        name
        for name, has in zip(records.classes, used.tolist(), strict=True)
        if name not in among and (has or not (gaps and name.isdigit()))
    ]


def twin_notes(train: Records, evaluation: Records) -> tuple[str, ...]:
    """Returns notes on files or contents with several labels, and on those in both parts."""
    if len(train) + len(evaluation) > _MOST_COMPARED:
        return ()
    notes, contents = list[str](), [part.contents() for part in (train, evaluation)]
    for name, part, content in zip(("train", "val"), (train, evaluation), contents, strict=True):
        if content is None:
            continue
        order = np.lexsort((part.labels, content))
        same, other = (np.diff(column[order]) for column in (content, part.labels))
        if (twice := content[order[1:]][(same == 0) & (other != 0)]).size:
            first = part.name(int(np.flatnonzero(np.isin(content, twice))[0]))
            notes.append(
                f"{len(np.unique(twice)):,} samples of {name} have several labels, the first: {first}"
            )
    if contents[0] is not None and contents[1] is not None:
        both = np.flatnonzero(np.isin(contents[1], contents[0]))
        if both.size:
            notes.append(
                f"{len(both):,} of {len(evaluation):,} samples of val are in train, too, the first: "
                f"{evaluation.name(int(both[0]))}"
            )
    return tuple(notes)


def class_notes(classes: Sequence[str], train: Records, evaluation: Records) -> tuple[str, ...]:
    """Returns notes on a single class, and on classes without evaluation samples."""
    notes = list[str]()
    if len(classes) == 1 and train.sets is None:  # of an image with several, one is there or not
        notes.append(
            f"there is one class only ('{classes[0]}'), so that loss and accuracy say nothing; is data.path "
            "one folder too high or too low?"
        )
    learned, measured = (_counts(part, classes) for part in (train, evaluation))
    empty = np.flatnonzero((learned > 0) & (measured == 0))
    if empty.size:
        more = f" (and {empty.size - 1:,} more)" if empty.size > 1 else ""
        notes.append(f"class '{classes[empty[0]]}'{more} has no samples in val, and isn't measured")
    return tuple(notes)


def _notes(config: DataConfig, classes: tuple[str, ...], train: Records) -> Iterator[str]:
    """Yields notes on classes: without samples, each of which still costs an output of the model; of a table
    that look like several; of folders that others number otherwise, and so weights of theirs, too.
    """
    empty = np.flatnonzero(_counts(train, classes) == 0)
    if empty.size:
        first = classes[empty[0]]
        yield f"{empty.size:,} of {len(classes):,} classes have no samples; the first is '{first}'"
    if config.label_separator is None:
        yield from joined_classes(classes)
    as_text = sorted(classes) if config.name == "folder" else classes
    for number, (ours, theirs) in enumerate(zip(classes, as_text, strict=True)):
        if ours != theirs:
            yield (
                f"classes are ordered as numbers: output {number} is '{ours}', and '{theirs}' in a model "
                "that was trained with torchvision's ImageFolder"
            )
            return


def digits() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Returns UCI's handwritten digits, file optdigits.tes: 1797 images of 8 x 8, 17 gray levels.

    E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits (1998), UCI Machine Learning
    Repository, https://doi.org/10.24432/C50P49, CC BY 4.0. A test compares them with scikit-learn's.

    The test set is a fifth of the images, 360 drawn at random independently of the run's seed. The file is
    sorted by writer: its last 360 images, by writers that the model hasn't seen, would be a harder test set.

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
    return ImageData(train, test, tuple("0123456789"), channels=1, mean=(0.287,), std=(0.354,))


def _cifar10(path: Path) -> ImageData:
    train, evaluation, classes = open_cifar10(path)
    # Of the training images.
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    return ImageData(train, evaluation, classes, channels=3, mean=mean, std=std, notes=odd_sizes(path))


def _synthetic(config: DataConfig, seed: int) -> ImageData:
    """Returns random images with random labels, to measure speed."""
    random = np.random.Generator(np.random.Philox(key(seed, Purpose.DATA)))
    size = (config.image_size, config.image_size, 3)

    def images(count: int) -> ArrayDataset:
        label = random.integers(0, config.classes, count, dtype=np.int64)
        # A prime number of random bytes, repeated: quick to make, and no two images are the same.
        noise = np.frombuffer(random.bytes(1_048_573), np.uint8)
        return ArrayDataset({IMAGE: np.resize(noise, (count, *size)), LABEL: label})

    train, evaluation = images(config.samples), images(max(1, config.samples // 8))
    classes = tuple(map(str, range(config.classes)))
    return ImageData(train, evaluation, classes, channels=3, mean=(0.5,) * 3, std=(0.29,) * 3)
