"""Mixup and CutMix: each image is mixed with another of its micro-batch, on the device.

Not torchvision's MixUp and CutMix: these draw one share for a whole micro-batch, on the CPU.
"""

from typing import NamedTuple

import torch


class Mixed(NamedTuple):
    """Images and what is in them.

    Attributes:
        image: float (n, c, h, w).
        other: int64 (n,): which image of the micro-batch was mixed into each.
        share: float (n,): how much of each is still its own.
    """

    image: torch.Tensor
    other: torch.Tensor
    share: torch.Tensor


def mix(image: torch.Tensor, mixup: float, cutmix: float) -> Mixed:
    """Mixes each image with its neighbor, by mixup (Zhang et al., 2018) or CutMix (Yun et al., 2019).

    Shares are drawn for each image from the device's default generator, which is keyed by the micro-batch.

    Args:
        image: float (n, c, h, w).
        mixup: Parameter of the Beta distribution of the share, 0 for none.
        cutmix: The same for CutMix. If both are positive, each image has one of the two, at random.
    """
    count, device = len(image), image.device
    other = torch.arange(count, device=device).roll(1)
    blend = torch.full((count,), mixup > 0, device=device)
    if mixup and cutmix:
        blend = torch.rand(count, device=device) < 0.5
    own_share = torch.ones(count, device=device)
    if mixup:
        own_share = torch.where(blend, _beta(mixup, count, device), own_share)
    box = torch.zeros((), dtype=torch.bool, device=device)
    if cutmix:
        box, outside = _box(_beta(cutmix, count, device), image.shape[2], image.shape[3])
        box = box & ~blend.view(-1, 1, 1, 1)
        own_share = torch.where(blend, own_share, outside)
    partner = image[other]
    weight = torch.where(blend, own_share, 1.0).view(-1, 1, 1, 1).to(image.dtype)
    return Mixed(torch.where(box, partner, torch.lerp(partner, image, weight)), other, own_share)


def _beta(parameter: float, count: int, device: torch.device) -> torch.Tensor:
    """Float (count,), from the symmetric Beta distribution."""
    both = torch.full((count, 2), parameter, device=device)
    return torch._sample_dirichlet(both)[:, 0]


def _box(share: torch.Tensor, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rectangle at a random place that leaves about `share` of an image; its edge may cut some off.

    Returns:
        bool (n, 1, height, width), and the share of the pixels outside of it, float (n,).
    """
    side = (1 - share).sqrt()
    inside = []
    for pixels in (height, width):
        middle = torch.rand(len(share), device=share.device) * pixels
        reach = side * pixels / 2
        place = torch.arange(pixels, device=share.device) + 0.5
        low, high = (middle - reach)[:, None], (middle + reach)[:, None]
        inside.append((place >= low) & (place < high))
    rows, columns = inside
    box = rows[:, None, :, None] & columns[:, None, None, :]
    return box, 1 - box.float().mean((1, 2, 3))
