"""Choice of the part of an image that a sample is."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from trainer.rng import key

_ATTEMPTS, _STEPS = 10, 1 << 24
_LONGEST = 32


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


def middle_cut(height: int, width: int) -> Box:
    """All of an image; where it is longer than 32 times its short side the middle, for memory's sake."""
    rows, columns = min(height, _LONGEST * width), min(width, _LONGEST * height)
    return Box((height - rows) // 2, (width - columns) // 2, rows, columns)


def central_window(height: int, width: int, side: int, share: float) -> tuple[int, int, Box]:
    """To which height and width an image is resized for evaluation, and the square that is taken of that.

    torchvision's Resize(side / share) and CenterCrop(side), such as 256 and 224.
    """
    short = round(side / share)
    rows, columns = max(short, short * height // width), max(short, short * width // height)
    return rows, columns, Box(round((rows - side) / 2), round((columns - side) / 2), side, side)


def random_cut(height: int, width: int, *numbers: float, shares: tuple[float, float] = (0.08, 1.0)) -> Box:
    """A part of the area at 3:4 to 4:3, as torchvision's RandomResizedCrop draws it.

    After Szegedy et al., "Going deeper with convolutions", 2015: what doesn't fit is drawn again, ten times
    at most, and then it is the middle.

    Args:
        height: Of the image.
        width: Of the image.
        *numbers: Four in [0, 1): area, ratio, and place down and right. What is drawn again follows from
            them.
        shares: Of the area, the smallest and the largest.
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
    """Four other numbers in [0, 1), of 24 bits each."""
    first = key(*(int(number * _STEPS) for number in numbers), attempt)
    second = key(first)
    return [bits % _STEPS / _STEPS for bits in (first, first >> 32, second, second >> 32)]
