"""Detection: boxes and classes in images."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.config.data import DataConfig, at_home
from trainer.config.model import ModelConfig
from trainer.config.tasks import DetectionConfig
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
from trainer.data.formats.records import reading_of
from trainer.data.loader import Batch
from trainer.data.sources import check_alike, check_folder
from trainer.errors import BadInputError
from trainer.models.detection import cell_middles, detections, make_detector, tiny_losses
from trainer.tasks.augment import Normalization
from trainer.tasks.average_precision import average_precision
from trainer.tasks.sums import weighted_sum

# Mean and deviation of the pixels / 255: of the embedded canvases, and ImageNet's.
_Statistics = tuple[tuple[float, ...], tuple[float, ...]]
_GRAY: _Statistics = ((0.25,), (0.2,))
_COLOR: _Statistics = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class Detection:
    """Images to boxes.

    The losses of torchvision's models are means over what they look at in a micro-batch; multiplied by its
    images they are not quite a sum over these, so another micro-batch trains slightly otherwise.
    tiny_detector's loss is one of each image by itself, and adds up exactly. torchvision's models wait for
    the device in each step, and so does their loss here.
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
        self._model, self._config, self._seed = model, config, seed
        self._mean, self._std = _GRAY if self.channels == 1 else _COLOR
        # torchvision's models normalize by themselves.
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
        """Classes, input shape, and normalization of tiny_detector's input: (pixel / 255 - mean) / std."""
        return {
            "classes": self.classes,
            "shape": (self.channels, self._size, self._size),
            "mean": self._mean,
            "std": self._std,
        }

    def model(self) -> nn.Module:
        """A new detector for these images."""
        return make_detector(self._model, self._config.norm, self._size, self.channels, len(self.classes))

    def inputs(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Images, float32 (n, channels, size, size): normalized, or in [0, 1] for torchvision's models."""
        return (self._normalize(batch.fields[IMAGE], self._model.channels_last),)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Summed over the images."""
        (image,) = self.inputs(batch)
        boxes, label, count = (batch.fields[name] for name in (BOXES, LABEL, COUNT))
        if self._model.name not in ("auto", "tiny_detector"):
            return _torchvision_loss(model, image, boxes, label, count, batch.weight)
        logits, places = model(image)
        stride = 2 << len(self._model.blocks)
        side = -(-self._size // stride)
        cells = cell_middles(side, side, stride, boxes)
        return weighted_sum(tiny_losses(logits.float(), places, cells, stride, boxes, label, count), batch)

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Returns the detections and the true boxes, a row for each image."""
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
        """Mean average precision, see `average_precision`."""
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
    """The sum of a model's losses, times the images of the micro-batch."""
    image = image.expand(-1, 3, -1, -1)
    counts = [boxes.shape[1]] * len(image) if image.is_meta else count.tolist()
    real = [True] * len(image) if weight is None or image.is_meta else (weight > 0).tolist()
    learned = [index for index, there in enumerate(real) if there]
    # Nothing but padding: each rank must call the model all the same, or the others wait for its gradients.
    chosen = learned or [0]
    # Their label 0 is the background.
    targets = [{"boxes": boxes[i, : counts[i]], "labels": label[i, : counts[i]] + 1} for i in chosen]
    losses = model([image[i] for i in chosen], targets)
    total: torch.Tensor = sum(losses.values()) * len(learned)
    return total


def _check_boxes(pictures: Pictures, config: DetectionConfig, data: DataConfig) -> None:
    """Makes sure that boxes have room, and that no more are left out than the budget allows.

    Raises:
        BadInputError: If not.
    """
    if pictures.most > config.max_boxes:
        raise BadInputError(
            f"an image has {pictures.most} boxes: set detection.max_boxes={pictures.most} or more"
        )
    for one in getattr(pictures, "left_out", ()):
        boxes = getattr(pictures, "boxes", 0)
        if one.reason == WRONG_BOX and one.count > (budget := data.corrupt_samples(boxes)):
            raise BadInputError(
                f"{one.count:,} of {boxes:,} boxes can't be meant, and data.corrupt_budget allows {budget:,}"
                f"; the first: {one.first}; mend them or raise the budget"
            )


def _more_pictures(data: DataConfig, split: str | None, seed: int) -> Pictures:
    """Images to measure on; of COCO's files only those of the split are read."""
    if data.name != "coco" or not isinstance(data.path, Path):
        return _pictures(data, seed)[1]
    from trainer.data.formats.coco import CocoPictures

    root = at_home(data.path, "data.path")
    check_folder(root)
    return CocoPictures(root, split or "val", data.on_corrupt, reading_of(data))


def _pictures(data: DataConfig, seed: int) -> tuple[Pictures, Pictures]:
    """Images for training and evaluation.

    Raises:
        BadInputError: If they aren't there or aren't what they should be.
    """
    if data.name == "digits-canvas":
        from trainer.data.builtin import digits_canvas as canvas

        if data.image_size != canvas.SIZE:
            raise BadInputError(
                f"data.name=digits-canvas draws {canvas.SIZE} pixels: set data.image_size={canvas.SIZE}"
            )
        return canvas.DigitsCanvas(0, canvas.TRAIN), canvas.DigitsCanvas(1, canvas.TEST)
    if data.name == "synthetic":
        from trainer.data.builtin.synthetic_boxes import SyntheticPictures

        size, classes = data.image_size, data.classes
        return (
            SyntheticPictures(size, classes, data.samples, seed),
            SyntheticPictures(size, classes, max(1, data.samples // 8), seed + 1),
        )
    if data.name != "coco":
        raise AssertionError(f"data.name={data.name} has no boxes")
    if not isinstance(data.path, Path):
        raise BadInputError(f"data.path is missing: data.name={data.name} needs --set data.path=DIR")
    from trainer.data.formats.coco import CocoPictures

    root = at_home(data.path, "data.path")
    check_folder(root)
    train, evaluation = (
        CocoPictures(root, part, data.on_corrupt, reading_of(data)) for part in ("train", "val")
    )
    if train.categories != evaluation.categories:
        odd = min(set(train.categories.items()) ^ set(evaluation.categories.items()))[0]
        here, there = (
            repr(part.categories[odd]) if odd in part.categories else "none" for part in (train, evaluation)
        )
        raise BadInputError(
            f"{root}: category {odd} isn't the same in train ({here}) and val ({there}): make the lists equal"
        )
    return train, evaluation
