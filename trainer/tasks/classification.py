"""Classification of images."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from trainer.data.loader import Batch
from trainer.data.sources import IMAGE, LABEL, DataConfig, load_images
from trainer.mixing import RegularizationConfig, mix
from trainer.models import ModelConfig, build_model
from trainer.stochastic_depth import add_stochastic_depth

_UNIFORMS = {"none": 0, "flip": 1, "affine": 5}


class Classification:
    """Images to classes, by cross entropy."""

    metric = "accuracy"

    def __init__(
        self, data: DataConfig, model: ModelConfig, regularization: RegularizationConfig, seed: int
    ) -> None:
        """Opens the data."""
        self.images = load_images(data, seed)
        self.train_data = self.images.train
        self.evaluation_data = self.images.evaluation
        self.uniforms = _UNIFORMS[data.augment]
        self._augment = data.augment
        self._model = model
        self._regularization = regularization
        mean, std = torch.tensor(self.images.mean), torch.tensor(self.images.std)
        # (pixel / 255 - mean) / std as one multiplication and one addition.
        self._scale = (1 / (255 * std)).view(-1, 1, 1)
        self._shift = (-mean / std).view(-1, 1, 1)
        self._constants: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def describe(self) -> Mapping[str, Any]:
        """Classes, input shape and normalisation: (pixel / 255 - mean) / std."""
        height, width, channels = self.train_data.fields[IMAGE].shape
        images = self.images
        return {
            "classes": images.classes,
            "shape": (channels, height, width),
            "mean": images.mean,
            "std": images.std,
        }

    def model(self) -> nn.Module:
        """A new model for these images."""
        model = build_model(self._model, self.images.channels, len(self.images.classes))
        if self._regularization.stochastic_depth:
            add_stochastic_depth(model, self._regularization.stochastic_depth)
        return model

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Cross entropy, summed over the shard."""
        image, label, chosen = self._pixels(batch, train=True), batch.fields[LABEL], self._regularization
        if not chosen.mixup and not chosen.cutmix:
            return _cross_entropy(model(image), label, batch, chosen.label_smoothing)
        mixed = mix(image, chosen.mixup, chosen.cutmix)
        logits = model(mixed.image)
        own = _cross_entropy(logits, label, batch, chosen.label_smoothing, mixed.share)
        other = _cross_entropy(logits, label[mixed.other], batch, chosen.label_smoothing, 1 - mixed.share)
        return own + other

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Loss and correct answers, summed over the shard."""
        logits = model(self._pixels(batch, train=False))
        correct = logits.argmax(1) == batch.fields[LABEL]
        if batch.weight is not None:
            correct = correct & (batch.weight > 0)
        loss = _cross_entropy(logits, batch.fields[LABEL], batch, 0.0)
        return {"loss": loss, "accuracy": correct.sum()}

    def _pixels(self, batch: Batch, train: bool) -> torch.Tensor:
        """Bytes (n, h, w, c) to normalised floats (n, c, h, w), augmented, in the model's memory format."""
        byte = batch.fields[IMAGE].permute(0, 3, 1, 2)
        if byte.device not in self._constants:
            self._constants[byte.device] = (self._scale.to(byte.device), self._shift.to(byte.device))
        scale, shift = self._constants[byte.device]
        layout = torch.channels_last if self._model.channels_last else torch.contiguous_format
        if not train or batch.uniform is None or not self.uniforms:
            return normalised(byte, scale, shift, layout)
        random = batch.uniform[:, -self.uniforms :]
        if self._augment == "flip":  # bytes: a quarter of the floats' memory traffic
            return normalised(flip(byte, random), scale, shift, layout)
        return affine(normalised(byte, scale, shift, layout), random)


def _cross_entropy(
    logits: torch.Tensor,
    label: torch.Tensor,
    batch: Batch,
    smoothing: float,
    share: torch.Tensor | None = None,
) -> torch.Tensor:
    """Summed over the shard, each sample times its share (n,)."""
    if batch.weight is None and share is None:
        return F.cross_entropy(logits, label, reduction="sum", label_smoothing=smoothing)
    each = F.cross_entropy(logits, label, reduction="none", label_smoothing=smoothing)
    if share is not None:
        each = each * share
    if batch.weight is None:
        return each.sum()
    # where, not a product: whatever the padding gives (an infinity too) counts for nothing.
    return torch.where(batch.weight > 0, each * batch.weight, 0.0).sum()


def normalised(
    byte: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, layout: torch.memory_format
) -> torch.Tensor:
    """Bytes (n, c, h, w) to floats: each channel times its scale (c, 1, 1), plus its shift."""
    return torch.addcmul(shift, byte.to(torch.float32, memory_format=layout), scale)


def flip(image: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Mirrors half of the images: any dtype (n, c, h, w), numbers (n, 1) in [0, 1)."""
    return torch.where(random.view(-1, 1, 1, 1) < 0.5, image.flip(3), image)


def affine(image: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Turns by up to 12 degrees, scales by up to 15 % and shifts by up to an eighth of the side.

    Args:
        image: float (n, c, h, w).
        random: (n, 5) in [0, 1): angle, width, height, shift right, shift down.

    Returns:
        float (n, c, h, w); what comes from outside repeats the border.
    """
    angle, width, height, right, down = random.mul(2).sub(1).view(-1, 5, 1, 1).unbind(1)
    cos, sin = (angle * 0.21).cos(), (angle * 0.21).sin()
    rows, columns = image.shape[2:]
    # The middle of each pixel on a scale from -1 to 1. By products and sums of each element and not by
    # affine_grid, whose matrix product autocast would round to bf16: half a pixel of 224.
    x = torch.arange(1 - columns, columns, 2, device=image.device) / columns
    y = (torch.arange(1 - rows, rows, 2, device=image.device) / rows)[:, None]
    across = cos * (1 + width * 0.15) * x - sin * y + right * 0.25
    down = sin * x + cos * (1 + height * 0.15) * y + down * 0.25
    grid = torch.stack((across, down), 3)
    return F.grid_sample(image, grid, padding_mode="border", align_corners=False)
