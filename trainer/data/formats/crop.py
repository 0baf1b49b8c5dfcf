"""Which part of an image a sample is."""

import math
from typing import NamedTuple


class Box(NamedTuple):
    """Part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


def snapped_cut(box: Box, side: int, height: int, width: int) -> tuple[Box, int]:
    """A cut that a JPEG decoded at 1/2, 1/4 or 1/8 of its size has exactly.

    Args:
        box: The cut that was drawn.
        side: Of the square that it will be resized to.
        height: Of the image.
        width: Of the image.

    Returns:
        The nearest cut whose edges are multiples of the divisor, at least `side` times that large both ways,
        and the divisor; the cut that was drawn and 1 where it isn't twice as large as `side`.
    """
    most = min(box.height, box.width) // side if side else 0
    by = max((divisor for divisor in (8, 4, 2) if divisor <= most), default=1)
    top, rows = _snapped(box.top, box.height, height, by)
    left, columns = _snapped(box.left, box.width, width, by)
    return Box(top, left, rows, columns), by


def _snapped(start: int, length: int, all_of_it: int, by: int) -> tuple[int, int]:
    blocks = min((2 * length + by) // (2 * by), all_of_it // by)
    first = (2 * start + length - blocks * by + by) // (2 * by)  # the middle moves as little as can be
    return max(0, min(first, all_of_it // by - blocks)) * by, blocks * by


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
