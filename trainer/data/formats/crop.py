"""Which part of an image a sample is."""

import math
from typing import NamedTuple


class Box(NamedTuple):
    """Part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


def central_cut(height: int, width: int) -> Box:
    """The central square of 7/8 of the short side (224 of 256)."""
    side = max(1, round(min(height, width) * 0.875))
    return Box((height - side) // 2, (width - side) // 2, side, side)


def random_cut(height: int, width: int, area: float, ratio: float, top: float, left: float) -> Box:
    """8 to 100 % of the area at 3:4 to 4:3, from four numbers in [0, 1).

    After Szegedy et al., "Going deeper with convolutions", 2015. What doesn't fit is shortened to the
    image's side; torchvision draws ten times and then falls back to the center.
    """
    target = height * width * (0.08 + 0.92 * area)
    aspect = math.exp(math.log(3 / 4) + ratio * math.log(16 / 9))
    cut_width = min(width, max(1, round(math.sqrt(target * aspect))))
    cut_height = min(height, max(1, round(math.sqrt(target / aspect))))
    return Box(
        int(top * (height - cut_height + 1)), int(left * (width - cut_width + 1)), cut_height, cut_width
    )
