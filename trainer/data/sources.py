"""Data sets by name: embedded digits, synthetic images, and images from folders, tables, shards and packs."""

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from trainer.data.corrupt import OnCorrupt
from trainer.data.dataset import ArrayDataset, Dataset
from trainer.data.files import in_folder, in_table
from trainer.data.images import ImageDataset
from trainer.data.loader import LoaderConfig
from trainer.data.pieces import in_pieces
from trainer.data.records import Records
from trainer.errors import BadInputError
from trainer.keyed_rng import Purpose, key, keys

IMAGE = "image"
LABEL = "label"


class DataConfig(LoaderConfig):
    """What is trained on, in batches of which size."""

    name: Literal["digits", "synthetic", "folder", "table", "shards", "pack"] = Field(
        "digits",
        description="digits (embedded), synthetic (no data needed), or images below data.path: folder "
        "(train/ and val/ by class), table (train.csv and val.csv, or .parquet, with path and label), shards "
        "(tar, after `trainer data index`) or pack (made by `trainer data pack`)",
    )
    path: Path | None = Field(None, description="where the data lies")
    on_corrupt: OnCorrupt = Field(
        "fail",
        description="a sample that can't be decoded: fail, skip (another, always the same, stands in) or "
        "quarantine (that, and the run folder's quarantine.jsonl names it)",
    )
    corrupt_budget: float = Field(
        0.001, ge=0, le=1, description="share of the samples that may be corrupt before the run fails"
    )
    global_batch: int = Field(64, ge=1, le=1 << 24, description="samples per optimiser step, over all ranks")
    micro_batch: int = Field(
        64, ge=1, description="samples per forward pass on one rank; part of the arithmetic"
    )
    evaluation_batch: int = Field(
        256, ge=1, description="samples per forward pass in evaluation, on one rank"
    )
    image_size: int = Field(224, ge=8, le=4096, description="height and width in pixels (but digits)")
    classes: int = Field(1000, ge=2, le=1 << 24, description="number of classes (synthetic)")
    samples: int = Field(1024, ge=1, le=1 << 20, description="number of training images (synthetic)")
    augment: Literal["none", "flip", "affine"] = Field(
        "none", description="on the device: flip (left-right) or affine (rotation, scale, shift)"
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
        if self.path is not None and self.name in ("digits", "synthetic"):
            raise ValueError(
                f"data.path is set but data.name={self.name} doesn't read it; "
                "add data.name=folder, or table, shards, pack"
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
    """

    train: Dataset
    evaluation: Dataset
    classes: tuple[str, ...]
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


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
    try:
        path = config.path.expanduser()
    except RuntimeError as error:
        raise BadInputError(f"data.path={config.path}: there is no such user; write the path out") from error
    train, evaluation = (open_records(config.name, path, split) for split in ("train", "val"))
    classes = _common_classes(path, train.classes, evaluation.classes)
    # The usual statistics of ImageNet.
    return ImageData(
        ImageDataset(train, config.image_size, random_crop=True, on_corrupt=config.on_corrupt),
        ImageDataset(evaluation, config.image_size, random_crop=False, on_corrupt=config.on_corrupt),
        classes,
        channels=3,
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
    )


def open_records(name: str, path: Path, split: str) -> Records:
    """Opens one part of a data set on disk.

    Args:
        name: "folder", "table", "shards" or "pack".
        path: What data.path says.
        split: "train" or "val".

    Raises:
        BadInputError: If it isn't there or isn't what it should be.
    """
    if name == "folder":
        return in_folder(path / split)
    if name == "table":
        parquet = path / f"{split}.parquet"
        return in_table(parquet if parquet.exists() else path / f"{split}.csv")
    return in_pieces(path / split)


def _common_classes(path: Path, train: Sequence[str], evaluation: Sequence[str]) -> tuple[str, ...]:
    """Those of both; where classes are numbers, one part may lack the last."""
    longer, shorter = sorted((tuple(train), tuple(evaluation)), key=len, reverse=True)
    if longer == shorter or (longer[: len(shorter)] == shorter and longer[0] == "0"):
        return longer
    odd = sorted(set(longer) ^ set(shorter))[:1] or ["(in another order)"]
    raise BadInputError(f"{path}: class '{odd[0]}' is in only one of train and val; add or remove it")


def _digits() -> ImageData:
    """UCI's handwritten digits as scikit-learn ships them: 1797 images of 8 x 8, 17 grey levels.

    A fifth of them, 360 drawn at random once and for all (whatever the run's seed), is the test set.
    The file is sorted by writer: with its last 360 as the test set, all from writers that the model
    hasn't seen, the task is harder.
    """
    # The file itself, because importing scikit-learn takes longer than training an epoch.
    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise BadInputError("data.name=digits comes with scikit-learn, which isn't installed; run make venv")
    file = Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    table = np.loadtxt(file, delimiter=",", dtype=np.int64)
    image = (table[:, :-1] * 15).astype(np.uint8).reshape(-1, 8, 8, 1)
    label = table[:, -1].copy()
    drawn = np.argsort(keys(key(Purpose.SPLIT), np.arange(len(label))))
    train, test = np.sort(drawn[360:]), np.sort(drawn[:360])
    return ImageData(
        ArrayDataset({IMAGE: image[train], LABEL: label[train]}),
        ArrayDataset({IMAGE: image[test], LABEL: label[test]}),
        tuple("0123456789"),
        channels=1,
        mean=(0.287,),
        std=(0.354,),
    )


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
