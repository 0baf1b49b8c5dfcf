"""Object detection: boxes and classes in images."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer.config.data import DataConfig, at_home
from trainer.config.model import ModelConfig
from trainer.config.tasks import DetectionConfig
from trainer.data.batch import Batch
from trainer.data.dataset import Dataset
from trainer.data.formats.boxes import (
    AREA,
    BOXES,
    COUNT,
    CROWD,
    IMAGE,
    LABEL,
    PIXEL,
    WRONG_BOX,
    BoxAugment,
    BoxedImages,
    Pictures,
)
from trainer.data.formats.index import index_folder
from trainer.data.formats.labels import quoted
from trainer.data.formats.records import is_upright
from trainer.data.sources import check_alike, check_folder, twin_notes
from trainer.errors import BadInputError
from trainer.models.detection import cell_centers, detections, make_detector, tiny_losses
from trainer.tasks.augment import Normalization
from trainer.tasks.average_precision import average_precision
from trainer.tasks.sums import weighted_sum

if TYPE_CHECKING:
    from trainer.data.formats.coco import CocoPictures

# Mean and standard deviation of pixel / 255: of the embedded canvases, and ImageNet's.
_Statistics = tuple[tuple[float, ...], tuple[float, ...]]
_GRAY: _Statistics = ((0.25,), (0.2,))
_COLOR: _Statistics = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class Detection:
    """Object detection.

    The losses of torchvision's models are means over a micro-batch's anchors or proposals; times the number
    of images they are only roughly a sum over images, so the result depends on the micro-batch size.
    tiny_detector's loss is computed per image, and its sum is exact. torchvision's models synchronize with
    the device in each step.
    """

    metric = "map"
    lower_is_better = False
    uniforms = 0

    def __init__(self, data: DataConfig, model: ModelConfig, config: DetectionConfig, seed: int) -> None:
        """Opens the data."""
        train, evaluation = _pictures(data, seed)
        for pictures in (train, evaluation):
            _check_boxes(pictures, config, data)
        augment = BoxAugment(config.flip, config.scale, config.mosaic)
        self._size = data.image_size
        self.classes, self.channels = tuple(train.classes), train.channels
        size, most, on_corrupt = self._size, config.max_boxes, data.on_corrupt
        self.train_data: Dataset = BoxedImages(train, size, most, augment, on_corrupt)
        self.evaluation_data: Dataset = BoxedImages(evaluation, size, most, None, on_corrupt)
        parts: Any = [getattr(pictures, "records", None) for pictures in (train, evaluation)]
        self.notes = twin_notes(*parts) if all(parts) else ()
        self._model, self._config, self._seed = model, config, seed
        self._mean, self._std = _GRAY if self.channels == 1 else _COLOR
        # torchvision's models normalize their input themselves.
        tiny = model.name in ("auto", "tiny_detector")
        self._normalize = Normalization(self._mean if tiny else (0.0,), self._std if tiny else (1.0,))

    def more_data(self, data: DataConfig, split: str | None) -> Dataset:
        """See `Extensible`."""
        pictures = _more_pictures(data, split, self._seed)
        _check_boxes(pictures, self._config, data)
        dataset = BoxedImages(pictures, self._size, self._config.max_boxes, None, data.on_corrupt)
        check_alike(dataset, pictures.classes, self.evaluation_data, self.classes)
        return dataset

    def describe(self) -> Mapping[str, Any]:
        """Returns classes, input shape, and tiny_detector's normalization: (pixel / 255 - mean) / std."""
        return {
            "classes": self.classes,
            "shape": (self.channels, self._size, self._size),
            "mean": self._mean,
            "std": self._std,
        }

    def model(self) -> nn.Module:
        """Returns a new detector for these images and classes."""
        return make_detector(self._model, self._config.norm, self._size, self.channels, len(self.classes))

    def inputs(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Returns images, float32 (n, channels, size, size): normalized, or in [0, 1] for torchvision."""
        return (self._normalize(batch.fields[IMAGE], self._model.channels_last),)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns the detection loss summed over the images."""
        (image,) = self.inputs(batch)
        boxes, label, count = (batch.fields[name] for name in (BOXES, LABEL, COUNT))
        if self._model.name not in ("auto", "tiny_detector"):
            return _torchvision_loss(model, image, boxes, label, count, batch.weight)
        logits, predicted = model(image)
        stride = 2 << len(self._model.blocks)
        side = -(-self._size // stride)
        cells = cell_centers(side, side, stride, boxes)
        return weighted_sum(tiny_losses(logits.float(), predicted, cells, stride, boxes, label, count), batch)

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Returns the rows of `average_precision`: detections and true boxes of each image."""
        (image,) = self.inputs(batch)
        most = self._config.detections
        found = detections(model, image, most)
        rows = {
            "boxes": image.new_zeros((len(found), most, 4), dtype=torch.float32),
            "scores": image.new_full((len(found), most), -1.0, dtype=torch.float32),
            "labels": torch.zeros((len(found), most), dtype=torch.int64, device=image.device),
        }
        for index, each in enumerate(found):
            for name, values in zip(rows, each, strict=True):
                rows[name][index, : len(values)] = values
        for name, field in (("boxes", BOXES), ("labels", LABEL), ("crowd", CROWD), ("area", AREA)):
            rows[f"true_{name}"] = batch.fields[field]
        rows["pixel"] = batch.fields[PIXEL][:, None]
        return {**rows, "true_count": batch.fields[COUNT][:, None]}

    def summarize(self, rows: Mapping[str, torch.Tensor]) -> Mapping[str, float]:
        """Returns the mean average precision, see `average_precision`."""
        arrays = {name: tensor.numpy() for name, tensor in rows.items()}
        arrays["true_count"] = arrays["true_count"][:, 0]
        return average_precision(arrays, len(self.classes))


def _torchvision_loss(
    model: nn.Module,
    image: torch.Tensor,
    boxes: torch.Tensor,
    label: torch.Tensor,
    count: torch.Tensor,
    weight: torch.Tensor | None,
) -> torch.Tensor:
    """Returns the sum of a torchvision model's losses, times the number of images in the micro-batch."""
    image = image.expand(-1, 3, -1, -1)
    counts = [boxes.shape[1]] * len(image) if image.is_meta else count.tolist()
    real = [True] * len(image) if weight is None or image.is_meta else (weight > 0).tolist()
    learned = [index for index, is_real in enumerate(real) if is_real]
    # With padding alone this rank must still call the model: the others wait for its gradients.
    chosen = learned or [0]
    # Label 0 of torchvision's models is the background.
    targets = [{"boxes": boxes[i, : counts[i]], "labels": label[i, : counts[i]] + 1} for i in chosen]
    losses = model([image[i] for i in chosen], targets)
    total: torch.Tensor = sum(losses.values()) * len(learned)
    return total


def _check_boxes(pictures: Pictures, config: DetectionConfig, data: DataConfig) -> None:
    """Checks the number of boxes per image, and the number of rejected boxes against the budget.

    Raises:
        BadInputError: If one of them is too large.
    """
    if pictures.most > config.max_boxes:
        raise BadInputError(
            f"an image has {pictures.most} boxes: set detection.max_boxes={pictures.most} or more"
        )
    for reason in getattr(pictures, "left_out", ()):
        boxes = getattr(pictures, "boxes", 0)
        if reason.reason == WRONG_BOX and reason.count > (budget := data.corrupt_samples(boxes)):
            raise BadInputError(
                f"{reason.count:,} of {boxes:,} boxes can't be meant, and data.corrupt_budget allows "
                f"{budget:,}; the first: {reason.first}; mend them or raise the budget"
            )


def _more_pictures(data: DataConfig, split: str | None, seed: int) -> Pictures:
    """Opens images for evaluation; of COCO's files only those of the split are read."""
    if data.name != "coco" or not isinstance(data.path, Path):
        return _pictures(data, seed)[1]
    return _coco(data, data.path, split or "val", training=False)


def _coco(data: DataConfig, path: Path, split: str, training: bool | None = None) -> "CocoPictures":
    from trainer.data.formats.coco import CocoPictures

    root = at_home(path, "data.path")
    check_folder(root, data.name)
    indexes = index_folder(data.index)
    pictures = CocoPictures(root, split, data.on_corrupt, is_upright(data), training, indexes)
    pictures.records.keep_hashes(data.index)
    return pictures


def _pictures(data: DataConfig, seed: int) -> tuple[Pictures, Pictures]:
    """Opens the images for training and for evaluation.

    Raises:
        BadInputError: If they are missing or malformed.
    """
    if data.name == "digits-canvas":
        from trainer.data.builtin import boxes as canvas

        if data.image_size != canvas.SIZE:
            raise BadInputError(
                f"data.name=digits-canvas draws {canvas.SIZE} pixels: set data.image_size={canvas.SIZE}"
            )
        return canvas.DigitsCanvas(0, canvas.TRAIN), canvas.DigitsCanvas(1, canvas.TEST)
    if data.name == "synthetic":
        from trainer.data.builtin.boxes import SyntheticPictures

        size, classes = data.image_size, data.classes
        return (
            SyntheticPictures(size, classes, data.samples, seed),
            SyntheticPictures(size, classes, max(1, data.samples // 8), seed + 1),
        )
    if data.name != "coco":
        raise AssertionError(f"data.name={data.name} has no boxes")
    if not isinstance(data.path, Path):
        raise BadInputError(f"data.path is missing: data.name={data.name} needs data.path=DIR")
    train, evaluation = (_coco(data, data.path, split) for split in ("train", "val"))
    if odd := [name for name in evaluation.classes if name not in train.classes]:
        raise BadInputError(
            f"{data.path}: category {quoted(odd[0])} is in val only; add it to train with boxes to "
            "learn from, or remove it"
        )
    return train, evaluation.numbered_by(train.classes)
