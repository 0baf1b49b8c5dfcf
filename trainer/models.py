"""Models: a small ResNet for small images, and torchvision's by name."""

import math
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import nn

from trainer.config import Section
from trainer.errors import BadInputError
from trainer.suggest import nearest

# ViT-S/16 (Touvron et al., 2021, DeiT-S), which torchvision has no name for.
_VIT_SMALL = {
    "image_size": 224,
    "patch_size": 16,
    "num_layers": 12,
    "num_heads": 6,
    "hidden_dim": 384,
    "mlp_dim": 1536,
}


class ModelConfig(Section):
    """What is trained."""

    name: str = Field(
        "auto",
        description="small_resnet and vit_small (images), gpt (language), audio_cnn (audio), tiny_detector "
        "(detection), or torchvision's models of images and of detection by name; auto: the task's own",
    )
    width: int = Field(32, ge=1, description="channels of the first stage (small_resnet)")
    blocks: tuple[Annotated[int, Field(ge=1, le=100)], ...] = Field(
        (1, 1), min_length=1, description="residual blocks in each stage (small_resnet)"
    )
    norm: Literal["batch", "group"] = Field("batch", description="normalisation (small_resnet)")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout before the last layer (small_resnet)")
    channels_last: bool = Field(False, description="NHWC memory format for convolutions")
    init_from: Path | None = Field(None, description="safetensors file to start from (fine-tuning)")
    fresh: tuple[str, ...] = Field(
        (), description='what is not taken from init_from and starts anew, by name: ["head.*"]'
    )

    @model_validator(mode="after")
    def _fresh_belongs_to_a_file(self) -> "ModelConfig":
        if self.fresh and self.init_from is None:
            raise ValueError("model.fresh is set but there is no model.init_from that it could leave out of")
        return self


def build_model(config: ModelConfig, channels: int, classes: int) -> nn.Module:
    """Builds a classifier of images: float (n, channels, height, width) to logits (n, classes).

    Raises:
        BadInputError: If torchvision has no such model.
    """
    if config.name in ("auto", "small_resnet"):
        return SmallResNet(config, channels, classes)
    # Here: it takes three seconds (it imports torch._dynamo), in the launcher and in every rank.
    from torchvision import models as torchvision_models

    if config.name == "vit_small":
        vit: nn.Module = torchvision_models.VisionTransformer(num_classes=classes, **_VIT_SMALL)
        return vit
    names = torchvision_models.list_models(module=torchvision_models)
    if config.name not in names:
        known = ["small_resnet", "vit_small", *names]
        raise BadInputError(f"model.name: no model '{config.name}'{nearest(config.name, known)}")
    model: nn.Module = torchvision_models.get_model(config.name, weights=None, num_classes=classes)
    return model


class SmallResNet(nn.Module):
    """A residual network for images of 8 to 32 pixels (He et al., 2016, with pre-activation)."""

    def __init__(self, config: ModelConfig, channels: int, classes: int) -> None:
        """Doubles the width and halves the resolution at each stage but the first."""
        super().__init__()
        width = config.width
        self.stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        stages = []
        for number, blocks in enumerate(config.blocks):
            target = config.width << number
            for index in range(blocks):
                stride = 2 if number and not index else 1
                stages.append(ResidualBlock(width, target, stride, config.norm))
                width = target
        self.blocks = nn.Sequential(*stages)
        self.norm = _norm(config.norm, width)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(width, classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Classifies: float (n, channels, height, width) to logits (n, classes)."""
        hidden = torch.relu(self.norm(self.blocks(self.stem(image))))
        logits: torch.Tensor = self.head(self.dropout(hidden.mean((2, 3))))
        return logits


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, source: int, target: int, stride: int, norm: str) -> None:
        """The shortcut is the identity where the shapes allow it."""
        super().__init__()
        self.norm1 = _norm(norm, source)
        self.conv1 = nn.Conv2d(source, target, 3, stride, padding=1, bias=False)
        self.norm2 = _norm(norm, target)
        self.conv2 = nn.Conv2d(target, target, 3, padding=1, bias=False)
        same = source == target and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(source, target, 1, stride, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float (n, source, h, w) to (n, target, h / stride, w / stride)."""
        active = torch.relu(self.norm1(hidden))
        inner = self.conv2(torch.relu(self.norm2(self.conv1(active))))
        shortcut: torch.Tensor = self.shortcut(active)
        result: torch.Tensor = shortcut + inner
        return result


def _norm(kind: str, width: int) -> nn.Module:
    return nn.BatchNorm2d(width) if kind == "batch" else nn.GroupNorm(math.gcd(8, width), width)
