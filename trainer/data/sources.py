"""Data sets by name: embedded digits, synthetic images, and images from folders, tables, shards and packs."""

import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import BeforeValidator, Field, field_validator, model_validator

from trainer.config.sizes import parse_size
from trainer.data.check import Check
from trainer.data.corrupt import OnCorrupt
from trainer.data.dataset import ArrayDataset, Dataset
from trainer.data.formats.cifar10 import open_cifar10
from trainer.data.formats.files import in_folder, in_table, readable
from trainer.data.formats.images import ImageDataset
from trainer.data.formats.pieces import in_pieces
from trainer.data.formats.records import Records
from trainer.data.kinds import EMBEDDED, Kind
from trainer.data.loader import LoaderConfig
from trainer.data.remote.access import check_url, is_url, join
from trainer.data.remote.cache import CachedPieces, open_cached, pieces_together
from trainer.errors import BadInputError
from trainer.rng import Purpose, key, keys

IMAGE = "image"
LABEL = "label"


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) else value


def _as_path(value: Any) -> Any:
    return Path(value) if isinstance(value, str) and not is_url(value) else value


class DataConfig(LoaderConfig):
    """What is trained on, in batches of which size."""

    name: Kind = Field(
        "digits",
        description="synthetic (random, no data needed); embedded: digits, stdlib (language), dtmf (audio), "
        "digits-canvas (detection); or below data.path: images as folder (train/ and val/ by class; or "
        "recordings), table (train.csv and val.csv, or .parquet, with path and label), shards (tar, after "
        "`trainer data index`), pack (made by `trainer data pack`) or cifar10 (its binary version); tokens "
        "(train.bin and val.bin, by `trainer data tokenize`), text (a file, by characters); coco; own: what "
        "a task in a file brings",
    )
    path: Annotated[Path | str | None, BeforeValidator(_as_path)] = Field(
        None,
        description="where the data lies: a folder, or for shards and pack s3://BUCKET/PATH or https://HOST/PATH",
    )
    cache: Path | None = Field(
        None, description="folder on this machine with copies of what lies behind a URL; jobs may share it"
    )
    cache_limit: Annotated[str | None, BeforeValidator(_as_text)] = Field(
        None,
        description="what copies of shards and packs may take, such as 200GB (default: no limit); where that "
        "isn't all, the order shuffles within a few of them at a time",
    )
    on_corrupt: OnCorrupt = Field(
        "fail",
        description="a sample that can't be decoded: fail, skip (another, always the same, stands in) or "
        "quarantine (that, and the run folder's quarantine.jsonl names it)",
    )
    corrupt_budget: float = Field(
        0.001, ge=0, le=1, description="share of the samples that may be corrupt before the run fails"
    )
    check: Check = Field(
        "fast",
        description="before ranks start: fast (all files that a folder, a table or COCO's annotations name, "
        "and all pieces of shards and packs, are there), full (that, and each sample decodes) or none",
    )
    global_batch: int = Field(64, ge=1, le=1 << 24, description="samples per optimiser step, over all ranks")
    micro_batch: int = Field(
        64,
        ge=1,
        description="samples per forward pass on one rank; part of the arithmetic; auto: the most that fits",
        json_schema_extra={"words": "int | auto"},
    )
    evaluation_batch: int = Field(
        256, ge=1, description="samples per forward pass in evaluation, on one rank"
    )
    image_size: int = Field(224, ge=8, le=4096, description="height and width in pixels (but digits)")
    classes: int = Field(1000, ge=2, le=1 << 24, description="number of classes (synthetic)")
    samples: int = Field(1024, ge=1, le=1 << 20, description="number of training samples (synthetic)")
    augment: Literal["none", "flip", "crop", "affine"] = Field(
        "none",
        description="on the device: flip (left-right), crop (that, and shifted by up to an eighth) or affine "
        "(rotation, scale, shift)",
    )
    jitter: float = Field(
        0.0,
        ge=0,
        le=1,
        description="on the device: how far brightness, contrast and saturation of each image may change",
    )
    policy: Literal["none", "randaugment", "trivialaugment"] = Field(
        "none", description="on the device: torchvision's policy, drawn for each group of policy_group images"
    )
    policy_group: int = Field(8, ge=1, description="images of a micro-batch that share what a policy draws")

    def corrupt_samples(self, of: int) -> int:
        """How many of so many samples may be corrupt: the budget, and one if it is above 0."""
        return math.ceil(self.corrupt_budget * of)

    @model_validator(mode="after")
    def _path_belongs_to_images(self) -> "DataConfig":
        if self.path is not None and self.name in EMBEDDED:
            raise ValueError(
                f"data.path is set but data.name={self.name} doesn't read it; "
                "add data.name=folder, or table, shards, pack"
            )
        return self

    @field_validator("micro_batch", mode="before")
    @classmethod
    def _auto_is_chosen_before(cls, value: Any) -> Any:
        if value == "auto":
            raise ValueError(
                "a number is needed here; `trainer train` chooses one, and `trainer tune RECIPE` tells which"
            )
        return value

    @field_validator("cache_limit")
    @classmethod
    def _limit_is_a_size(cls, value: str | None) -> str | None:
        if value is not None:
            parse_size(value)
        return value

    @model_validator(mode="after")
    def _urls_are_cached(self) -> "DataConfig":
        # Here and not at the field: whose error would repeat the URL, with what must not be in it.
        if not isinstance(self.path, str):
            if self.cache is not None or self.cache_limit is not None:
                raise ValueError(
                    "data.cache and data.cache_limit are for a data.path that is a URL; leave them out"
                )
            return self
        try:
            check_url(self.path)
        except ValueError as error:
            raise ValueError(f"data.path: {error}") from None
        if self.name not in ("shards", "pack"):
            raise ValueError(
                f"data.path is a URL, and data.name={self.name} reads files of this machine; use "
                "data.name=pack or shards, or copy the data here"
            )
        if self.cache is None:
            raise ValueError(
                "data.path is a URL, so data.cache is needed: --set data.cache=DIR, a folder for copies"
            )
        return self


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
    if config.path is None:
        raise BadInputError(f"data.path is missing: data.name={config.name} needs --set data.path=DIR")
    path = _at_home("path", config.path)
    if isinstance(path, Path):
        check_folder(path)
    if config.name == "cifar10":
        return _cifar10(Path(path))
    train, evaluation = (
        open_records(config.name, path, split, config.cache, config.cache_limit) for split in ("train", "val")
    )
    if isinstance(train, CachedPieces) and isinstance(evaluation, CachedPieces):
        train.together = pieces_together(_bytes(config.cache_limit), (train, evaluation))
    classes = common_classes(path, train, evaluation, gaps=config.name != "folder")
    # The usual statistics of ImageNet.
    return ImageData(
        ImageDataset(train, config.image_size, random_crop=True, on_corrupt=config.on_corrupt),
        ImageDataset(evaluation, config.image_size, random_crop=False, on_corrupt=config.on_corrupt),
        classes,
        channels=3,
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        notes=_of_nobody(classes, train),
    )


def open_records(
    name: str, path: Path | str, split: str, cache: Path | None = None, cache_limit: str | None = None
) -> Records:
    """Opens one part of a data set.

    Args:
        name: "folder", "table", "shards" or "pack".
        path: What data.path says; a string if it is a URL.
        split: "train" or "val".
        cache: What data.cache says; needed for a URL.
        cache_limit: What data.cache_limit says.

    Raises:
        BadInputError: If it isn't there or isn't what it should be.
    """
    if isinstance(path, str):
        assert cache is not None
        folder = Path(_at_home("cache", cache)).absolute()
        return open_cached(join(path, split), folder, _bytes(cache_limit))
    if name == "folder":
        return in_folder(path / split)
    if name == "table":
        parquet = path / f"{split}.parquet"
        return in_table(parquet if parquet.exists() else path / f"{split}.csv")
    return in_pieces(path / split)


def order_of(dataset: Dataset) -> tuple[tuple[int, ...], int]:
    """Samples of each piece, and of how many pieces they are shuffled together; () and 0: of all."""
    records = getattr(dataset, "records", None)
    if isinstance(records, CachedPieces) and records.together:
        return tuple(records.sizes), records.together
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
    if isinstance(path, str):
        return path
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise BadInputError(f"data.{key}={path}: there is no such user; write the path out") from error


def common_classes(
    path: Path | str, train: Records, evaluation: Records, gaps: bool = False
) -> tuple[str, ...]:
    """Those of both parts; where classes are numbers, one part may lack the last.

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
        raise BadInputError(
            f"{path}: class '{name}'{more} is in {part} only; add it to the other part, or remove it"
        )
    learned, measured = (np.bincount(part.labels, minlength=len(longer)) for part in (train, evaluation))
    empty = np.flatnonzero((learned == 0) & ((measured > 0) | (not (numbers and gaps))))
    if empty.size:
        more = f" (and {empty.size - 1:,} more)" if empty.size > 1 else ""
        raise BadInputError(
            f"{path}: class '{longer[empty[0]]}'{more} has no samples in train, and "
            f"{measured[empty].sum():,} in val; add some to learn from, or remove it"
        )
    return longer


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
    """UCI's handwritten digits, its file optdigits.tes: 1797 images of 8 x 8, 17 grey levels.

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
    return ImageData(train, evaluation, classes, channels=3, mean=mean, std=std)


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
