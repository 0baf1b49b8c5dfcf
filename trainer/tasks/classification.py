"""Classification of images."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from typing_extensions import assert_never

from trainer.config.data import DataConfig
from trainer.config.model import ModelConfig
from trainer.config.tasks import RegularizationConfig
from trainer.data.batch import Batch
from trainer.data.dataset import Dataset
from trainer.data.formats.records import LABEL
from trainer.data.sources import IMAGE, check_alike, load_images, more_images
from trainer.errors import BadInputError
from trainer.models.images import build_model
from trainer.models.stochastic_depth import add_stochastic_depth
from trainer.tasks.augment import Normalization, affine, by_policy, crop, flip, jitter, make_policy, mix
from trainer.tasks.sums import classified, cross_entropy

_UNIFORMS = {"none": 0, "flip": 1, "crop": 3, "affine": 5}


class Classification:
    """Image classification by cross entropy."""

    metric = "accuracy"
    lower_is_better = False

    def __init__(
        self, data: DataConfig, model: ModelConfig, regularization: RegularizationConfig, seed: int
    ) -> None:
        """Opens the data."""
        self.images = load_images(data, seed)
        self.train_data = self.images.train
        self.evaluation_data = self.images.evaluation
        self.notes = self.images.notes
        # One label, or 0 or 1 for each class.
        self.several = bool(self.train_data.fields[LABEL].shape)
        if self.several and regularization.label_smoothing:
            raise BadInputError(
                "regularization.label_smoothing is for images of one class each; leave it out"
            )
        self.uniforms = _UNIFORMS[data.augment] + (3 if data.jitter else 0)
        self._data, self._seed = data, seed
        self._policy = make_policy(data.policy, data.policy_magnitude)
        self._model = model
        self._regularization = regularization
        self._normalize = Normalization(self.images.mean, self.images.std)

    def more_data(self, data: DataConfig, split: str | None) -> Dataset:
        """See `Extensible`."""
        dataset, classes = more_images(data, split, self._seed)
        check_alike(dataset, classes, self.evaluation_data, self.images.classes)
        return dataset

    def describe(self) -> Mapping[str, Any]:
        """Returns classes, input shape and normalization: (pixel / 255 - mean) / std."""
        height, width, channels = self.train_data.fields[IMAGE].shape
        images = self.images
        return {
            "classes": images.classes,
            **({"several": True} if self.several else {}),
            "shape": (channels, height, width),
            "mean": images.mean,
            "std": images.std,
        }

    def model(self) -> nn.Module:
        """Returns a new model for these images and classes."""
        model = build_model(self._model, self.images.channels, len(self.images.classes))
        if self._regularization.stochastic_depth:
            add_stochastic_depth(model, self._regularization.stochastic_depth)
        return model

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns the cross entropy summed over the micro-batch."""
        image, label, chosen = self._pixels(batch, train=True), batch.fields[LABEL], self._regularization
        if not chosen.mixup and not chosen.cutmix:
            return cross_entropy(model(image), label, batch, chosen.label_smoothing)
        mixed = mix(image, chosen.mixup, chosen.cutmix)
        logits = model(mixed.image)
        own = cross_entropy(logits, label, batch, chosen.label_smoothing, mixed.fraction)
        other = cross_entropy(logits, label[mixed.other], batch, chosen.label_smoothing, 1 - mixed.fraction)
        return own + other

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Returns loss and metrics summed over the micro-batch."""
        return classified(model(*self.inputs(batch)), batch.fields[LABEL], batch)

    def inputs(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Returns normalized images, float (n, channels, height, width)."""
        return (self._pixels(batch, train=False),)

    def _pixels(self, batch: Batch, train: bool) -> torch.Tensor:
        """Normalizes, and augments to train: uint8 (n, h, w, c) to float (n, c, h, w)."""
        byte, chosen = batch.fields[IMAGE], self._data
        if not train:
            return self._normalize(byte, self._model.channels_last)
        random = self._uniforms(batch)
        if self._policy is not None or chosen.jitter:
            planes = byte.permute(0, 3, 1, 2)
            if self._policy is not None:
                planes = by_policy(planes, self._policy, chosen.policy_group)
            if chosen.jitter:
                planes = jitter(planes, random[:, -3:], chosen.jitter)
            byte = planes.permute(0, 2, 3, 1).contiguous()
        last = self._model.channels_last
        match chosen.augment:
            case "none":
                return self._normalize(byte, last)
            case "flip":
                return self._normalize(byte, last, random[:, :1])
            case "crop":  # of bytes: a quarter of the floats' memory traffic
                return self._normalize(crop(flip(byte, random[:, :1]), random[:, 1:3]), last)
            case "affine":
                return affine(self._normalize(byte, last), random[:, :5])
            case _:
                assert_never(chosen.augment)

    def _uniforms(self, batch: Batch) -> torch.Tensor:
        """Returns this task's random numbers, (n, uniforms): the last columns of the batch's."""
        if batch.uniform is None:
            return torch.empty(0)
        return batch.uniform[:, batch.uniform.shape[1] - self.uniforms :]
