"""Data sets by name: embedded digits, synthetic images, and a folder of images by class."""

import importlib.util
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from trainer.data.dataset import ArrayDataset, Dataset
from trainer.data.folder import FolderDataset
from trainer.data.loader import LoaderConfig
from trainer.errors import BadInputError
from trainer.keyed_rng import Purpose, key, keys

IMAGE = "image"
LABEL = "label"


class DataConfig(LoaderConfig):
    """What is trained on, in batches of which size."""

    name: Literal["digits", "synthetic", "folder"] = Field(
        "digits",
        description="digits (embedded), synthetic (no data needed) or folder (train/ and val/ by class)",
    )
    path: Path | None = Field(None, description="where the data lies (folder)")
    global_batch: int = Field(64, ge=1, le=1 << 24, description="samples per optimiser step, over all ranks")
    micro_batch: int = Field(
        64, ge=1, description="samples per forward pass on one rank; part of the arithmetic"
    )
    evaluation_batch: int = Field(
        256, ge=1, description="samples per forward pass in evaluation, on one rank"
    )
    image_size: int = Field(224, ge=8, le=4096, description="height and width in pixels (synthetic, folder)")
    classes: int = Field(1000, ge=2, le=1 << 24, description="number of classes (synthetic)")
    samples: int = Field(1024, ge=1, le=1 << 20, description="number of training images (synthetic)")
    augment: Literal["none", "flip", "affine"] = Field(
        "none", description="on the device: flip (left-right) or affine (rotation, scale, shift)"
    )

    @model_validator(mode="after")
    def _path_belongs_to_a_folder(self) -> "DataConfig":
        if self.path is not None and self.name != "folder":
            raise ValueError(
                f"data.path is set but data.name={self.name} doesn't read it; add data.name=folder"
            )
        return self


class ImageData(NamedTuple):
    """Images for training and evaluation, and what the model must know of them.

    Attributes:
        train: Data set with the fields image, uint8 (channels, height, width), and label, int64 ().
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
        raise BadInputError("data.path is missing: data.name=folder needs --set data.path=DIR")
    try:
        path = config.path.expanduser()
    except RuntimeError as error:
        raise BadInputError(f"data.path={config.path}: there is no such user; write the path out") from error
    train = FolderDataset(path / "train", config.image_size, random_crop=True)
    evaluation = FolderDataset(path / "val", config.image_size, random_crop=False)
    if train.classes != evaluation.classes:
        odd = sorted(set(train.classes) ^ set(evaluation.classes))[0]
        raise BadInputError(f"{path}: class '{odd}' is in only one of train/ and val/; add or remove it")
    # The usual statistics of ImageNet.
    return ImageData(train, evaluation, train.classes, 3, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


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
    image = (table[:, :-1] * 15).astype(np.uint8).reshape(-1, 1, 8, 8)
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
    size = (3, config.image_size, config.image_size)

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
