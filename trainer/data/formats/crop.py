"""Choice of the crop of an image."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from trainer.rng import key

_ATTEMPTS, _STEPS = 10, 1 << 24
_LONGEST = 32


class Box(NamedTuple):
    """Crop of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


def snapped_cut(box: Box, side: int, height: int, width: int) -> tuple[Box, int]:
    """Aligns a crop to a divisor by which a JPEG can be shrunk while decoding.

    Args:
        box: Crop that was drawn.
        side: Side of the square that the crop will be resized to.
        height: Height of the image.
        width: Width of the image.

    Returns:
        The nearest crop whose edges are multiples of the divisor, and the largest divisor of 8, 4 and 2 by
        which the crop is larger than `side`; `box` and 1 if it isn't twice as large.
    """
    most = min(box.height, box.width) // side if side else 0
    by = max((divisor for divisor in (8, 4, 2) if divisor <= most), default=1)
    top, rows = _snapped(box.top, box.height, height, by)
    left, columns = _snapped(box.left, box.width, width, by)
    return Box(top, left, rows, columns), by


def _snapped(start: int, length: int, all_of_it: int, by: int) -> tuple[int, int]:
    blocks = min((2 * length + by) // (2 * by), all_of_it // by)
    first = (2 * start + length - blocks * by + by) // (2 * by)  # moves the center as little as possible
    return max(0, min(first, all_of_it // by - blocks)) * by, blocks * by


def middle_cut(height: int, width: int) -> Box:
    """Returns the full image, or the center of one longer than 32 times its short side, to bound memory."""
    rows, columns = min(height, _LONGEST * width), min(width, _LONGEST * height)
    return Box((height - rows) // 2, (width - columns) // 2, rows, columns)


def central_window(height: int, width: int, side: int, fraction: float) -> tuple[int, int, Box]:
    """Returns the height and width that evaluation resizes to, and the center crop.

    As torchvision's Resize(side / fraction) and CenterCrop(side), such as 256 and 224.
    """
    short = round(side / fraction)
    rows, columns = max(short, short * height // width), max(short, short * width // height)
    return rows, columns, Box(round((rows - side) / 2), round((columns - side) / 2), side, side)


def random_cut(height: int, width: int, *numbers: float, shares: tuple[float, float] = (0.08, 1.0)) -> Box:
    """Draws a crop of aspect ratio 3:4 to 4:3, as torchvision's RandomResizedCrop.

    After Szegedy et al., "Going deeper with convolutions", 2015: a crop that doesn't fit is drawn again, at
    most ten times; then the center is taken.

    Args:
        height: Height of the image.
        width: Width of the image.
        *numbers: Four random numbers in [0, 1): area, ratio, vertical and horizontal position. Further draws
        are
            keyed by them.
        shares: Smallest and largest fraction of the area.
    """
    area, ratio, top, left = numbers
    for attempt in range(1, _ATTEMPTS + 1):
        target = height * width * (shares[0] + (shares[1] - shares[0]) * area)
        aspect = math.exp((2 * ratio - 1) * math.log(4 / 3))
        rows, columns = round(math.sqrt(target / aspect)), round(math.sqrt(target * aspect))
        if 0 < rows <= height and 0 < columns <= width:
            return Box(int(top * (height - rows + 1)), int(left * (width - columns + 1)), rows, columns)
        area, ratio, top, left = _drawn_again(numbers, attempt)
    rows, columns = min(height, round(width * 4 / 3)), min(width, round(height * 4 / 3))
    return Box((height - rows) // 2, (width - columns) // 2, rows, columns)


def _drawn_again(numbers: Sequence[float], attempt: int) -> list[float]:
    """Returns four other numbers in [0, 1), of 24 bits each."""
    first = key(*(int(number * _STEPS) for number in numbers), attempt)
    second = key(first)
    return [bits % _STEPS / _STEPS for bits in (first, first >> 32, second, second >> 32)]
