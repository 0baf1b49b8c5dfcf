"""Mixup and CutMix: each image is mixed with another of its micro-batch, on the device.

torchvision's MixUp and CutMix draw one fraction for a whole micro-batch, on the CPU.
"""

from typing import NamedTuple

import torch


class Mixed(NamedTuple):
    """Mixed images.

    Attributes:
        image: float (n, c, h, w).
        other: int64 (n,): index of the image that was mixed into each.
        fraction: float (n,): fraction of each image that is its own.
    """

    image: torch.Tensor
    other: torch.Tensor
    fraction: torch.Tensor


def mix(image: torch.Tensor, mixup: float, cutmix: float) -> Mixed:
    """Mixes each image with its neighbor, by mixup (Zhang et al., 2018) or CutMix (Yun et al., 2019).

    Fractions are drawn for each image from the device's default generator, which is keyed by the micro-batch.

    Args:
        image: float (n, c, h, w).
        mixup: Parameter of mixup's symmetric Beta distribution; 0: no mixup.
        cutmix: Parameter of CutMix's; 0: no CutMix. If both are positive, each image gets one, at random.
    """
    count, device = len(image), image.device
    other = torch.arange(count, device=device).roll(1)
    blend = torch.full((count,), mixup > 0, device=device)
    if mixup and cutmix:
        blend = torch.rand(count, device=device) < 0.5
    own = torch.ones(count, device=device)
    if mixup:
        own = torch.where(blend, _beta(mixup, count, device), own)
    box = torch.zeros((), dtype=torch.bool, device=device)
    if cutmix:
        box, outside = _box(_beta(cutmix, count, device), image.shape[2], image.shape[3])
        box = box & ~blend.view(-1, 1, 1, 1)
        own = torch.where(blend, own, outside)
    partner = image[other]
    weight = torch.where(blend, own, 1.0).view(-1, 1, 1, 1).to(image.dtype)
    return Mixed(torch.where(box, partner, torch.lerp(partner, image, weight)), other, own)


def _beta(parameter: float, count: int, device: torch.device) -> torch.Tensor:
    """Draws from the symmetric Beta distribution: float (count,)."""
    both = torch.full((count, 2), parameter, device=device)
    return torch._sample_dirichlet(both)[:, 0]


def _box(fraction: torch.Tensor, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws rectangles that leave about `fraction` of an image; the image's border may clip them.

    Returns:
        bool (n, 1, height, width), and the fraction of the pixels outside of it, float (n,).
    """
    side = (1 - fraction).sqrt()
    inside = []
    for pixels in (height, width):
        center = torch.rand(len(fraction), device=fraction.device) * pixels
        half = side * pixels / 2
        position = torch.arange(pixels, device=fraction.device) + 0.5
        low, high = (center - half)[:, None], (center + half)[:, None]
        inside.append((position >= low) & (position < high))
    rows, columns = inside
    box = rows[:, None, :, None] & columns[:, None, None, :]
    return box, 1 - box.float().mean((1, 2, 3))
