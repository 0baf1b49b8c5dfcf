"""Inputs and outputs of an exported model."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


def leaves(output: Any) -> list[torch.Tensor]:
    """Returns the tensors of a model's output in order: a tensor, a tuple, a mapping, or these nested."""
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


class InLowPrecision(nn.Module):
    """Wraps a bfloat16 model so that its inputs and outputs are float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *values: torch.Tensor) -> Any:
        """Casts floating-point inputs to bfloat16, and outputs to float32."""
        output = self.model(*(v.to(torch.bfloat16) if v.is_floating_point() else v for v in values))
        return pytree.tree_map(_float32, output)


def _float32(value: Any) -> Any:
    low = isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
    return value.float() if low else value


class FromPixels(nn.Module):
    """Wraps a classifier: uint8 (n, height, width, channels) to probabilities (n, classes)."""

    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(self, model: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        """Takes mean and standard deviation of each channel on the scale 0 to 1."""
        super().__init__()
        self.model = model
        deviation = torch.tensor(std).view(-1, 1, 1)
        self.register_buffer("scale", 1 / (255 * deviation))
        self.register_buffer("shift", -torch.tensor(mean).view(-1, 1, 1) / deviation)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Normalizes, classifies, softmax."""
        planes = image.permute(0, 3, 1, 2).float() * self.scale + self.shift
        return torch.softmax(self.model(planes).float(), 1)
