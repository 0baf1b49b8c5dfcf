"""Image classifiers: a small ResNet for small images, torchvision's and timm's models by name."""

import math

import torch
from torch import nn

from trainer.config.model import ModelConfig
from trainer.config.models import models_of, opens
from trainer.config.registry import named
from trainer.config.suggest import nearest
from trainer.errors import BadInputError

_TASK, _TIMM = "classification", "timm/"
# ViT-S/16 (Touvron et al., 2021, DeiT-S), which torchvision lacks.
_VIT_SMALL = {
    "image_size": 224,
    "patch_size": 16,
    "num_layers": 12,
    "num_heads": 6,
    "hidden_dim": 384,
    "mlp_dim": 1536,
}


def build_model(config: ModelConfig, channels: int, classes: int) -> nn.Module:
    """Builds a classifier of images: float (n, channels, height, width) to logits (n, classes).

    Raises:
        BadInputError: If torchvision or timm has no such model.
    """
    model: nn.Module
    if ours := opens(config.name, _TASK):
        model = named(ours)(config, channels, classes)
        return model
    if config.name.startswith(_TIMM):
        return _timm_model(config.name.removeprefix(_TIMM), channels, classes)
    # Imported late: it takes three seconds (torch._dynamo), in the launcher and in every rank.
    from torchvision import models as torchvision_models

    names = torchvision_models.list_models(module=torchvision_models)
    if config.name not in names:
        known = [*models_of(_TASK), *names]
        raise BadInputError(f"model.name: no model '{config.name}'{nearest(config.name, known)}")
    model = torchvision_models.get_model(config.name, weights=None, num_classes=classes)
    return model


def vit_small(_: ModelConfig, __: int, classes: int) -> nn.Module:
    """Returns a ViT-S/16 for images of three channels and 224 pixels."""
    from torchvision.models import VisionTransformer

    model: nn.Module = VisionTransformer(num_classes=classes, **_VIT_SMALL)
    return model


def _timm_model(name: str, channels: int, classes: int) -> nn.Module:
    try:
        import timm
    except ImportError as error:
        raise BadInputError(f"model.name={_TIMM}{name}: timm is not installed; run make venv") from error
    names = timm.list_models()
    if name not in names:
        raise BadInputError(f"model.name: timm has no model '{name}'{nearest(name, names)}")
    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=classes, in_chans=channels)
    return model


class SmallResNet(nn.Module):
    """Residual network for images of 8 to 32 pixels (He et al., 2016, with pre-activation)."""

    def __init__(self, config: ModelConfig, channels: int, classes: int) -> None:
        """Builds the stages: each except for the first doubles the width and halves the resolution."""
        super().__init__()
        self.stem = nn.Conv2d(channels, config.width, 3, padding=1, bias=False)
        self.blocks, width = residual_stages(config, first_stride=1)
        self.norm = make_norm(config.norm, width)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(width, classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Classifies: float (n, channels, height, width) to logits (n, classes)."""
        hidden = torch.relu(self.norm(self.blocks(self.stem(image))))
        logits: torch.Tensor = self.head(self.dropout(hidden.mean((2, 3))))
        return logits


class ResidualBlock(nn.Module):
    """Residual block of two convolutions with pre-activation."""

    def __init__(self, source: int, target: int, stride: int, norm: str) -> None:
        """Builds the block; its shortcut is the identity where the shapes allow it."""
        super().__init__()
        self.norm1 = make_norm(norm, source)
        self.conv1 = nn.Conv2d(source, target, 3, stride, padding=1, bias=False)
        self.norm2 = make_norm(norm, target)
        self.conv2 = nn.Conv2d(target, target, 3, padding=1, bias=False)
        same = source == target and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(source, target, 1, stride, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps float (n, source, h, w) to (n, target, h / stride, w / stride)."""
        active = torch.relu(self.norm1(hidden))
        inner = self.conv2(torch.relu(self.norm2(self.conv1(active))))
        shortcut: torch.Tensor = self.shortcut(active)
        result: torch.Tensor = shortcut + inner
        return result


def residual_stages(config: ModelConfig, first_stride: int) -> tuple[nn.Sequential, int]:
    """Returns the blocks of all stages, and the channels of the last; each stage but the first doubles them.

    Args:
        config: The width, and the number of blocks of each stage.
        first_stride: Stride of the first stage; the others have 2.
    """
    stages, width = [], config.width
    for number, blocks in enumerate(config.blocks):
        stride, target = 2 if number else first_stride, config.width << number
        for _ in range(blocks):
            stages.append(ResidualBlock(width, target, stride, config.norm))
            stride, width = 1, target
    return nn.Sequential(*stages), width


def make_norm(kind: str, width: int) -> nn.Module:
    """Returns a BatchNorm ("batch") or GroupNorm ("group") of `width` channels."""
    return nn.BatchNorm2d(width) if kind == "batch" else GroupNorm(math.gcd(8, width), width)


class GroupNorm(nn.GroupNorm):
    """A GroupNorm that may stand behind frozen layers."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the normalized input, in its shape."""
        # Where the channels come last on a CPU, torch's backward pass writes the input's gradient even if it
        # isn't wanted, as behind frozen layers: a segmentation fault (seen with torch 2.9.1).
        if input.device.type == "cpu" and torch.is_grad_enabled() and not input.requires_grad:
            input = input.contiguous()
        return super().forward(input)
