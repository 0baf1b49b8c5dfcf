"""EXIF's orientation, and its effect on pixels and on parts of an image."""

import io
import warnings
from typing import Any

import torch

from trainer.data.formats.crop import Box

UPRIGHT = 1
_TAG = 0x0112
# Without one of these no JPEG or PNG has an orientation; with one, PIL says which.
_SIGNS = (b"Exif\0", b"eXIf", b"Raw profile type exif", b"adobe.com/xap", b"com.adobe.xmp")
SWAPPED = 5  # from here on, height and width are exchanged
_ROWS, _COLUMNS = (3, 4, 6, 7), (2, 3, 7, 8)


def orientation(data: bytes | bytearray, formats: tuple[str, ...] = ("JPEG", "PNG")) -> int:
    """The orientation that an image's EXIF or XMP says, 1 to 8; 1 where there is none, or none that is known.

    Args:
        data: The file. PIL turns a TIFF itself, so that its orientation is 1.
        formats: Those that PIL may take it for.
    """
    if data.startswith((b"\xff\xd8", b"\x89PNG")) and not any(sign in data for sign in _SIGNS):
        return UPRIGHT
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=formats) as file:
                return UPRIGHT if file.format == "TIFF" else orientation_of(file)
    except Exception:  # a file that can't be read, which who decodes it says
        return UPRIGHT


def orientation_of(file: Any) -> int:
    """Returns the orientation of an image that PIL has opened; see `orientation`."""
    try:
        found = file.getexif().get(_TAG, UPRIGHT)
        return int(found) if found in range(2, 9) else UPRIGHT
    except Exception:  # PIL raises whatever damaged tags lead to; the pixels may be fine
        return UPRIGHT


def turned_size(orientation: int, height: int, width: int) -> tuple[int, int]:
    """Height and width of an image once it is upright."""
    return (width, height) if orientation >= SWAPPED else (height, width)


def stored_box(box: Box, orientation: int, height: int, width: int) -> Box:
    """Returns the stored image's box for a box of the upright one; height and width are the stored one's."""
    if orientation >= SWAPPED:
        box = Box(box.left, box.top, box.width, box.height)
    top, left = box.top, box.left
    if orientation in _ROWS:
        top = height - top - box.height
    if orientation in _COLUMNS:
        left = width - left - box.width
    return Box(top, left, box.height, box.width)


def apply_orientation(image: torch.Tensor, orientation: int) -> torch.Tensor:
    """An image (…, height, width) or a part of it made upright, as PIL's `ImageOps.exif_transpose` does."""
    axes = [axis for axis, which in ((-2, _ROWS), (-1, _COLUMNS)) if orientation in which]
    image = image.flip(axes) if axes else image
    return image.transpose(-2, -1) if orientation >= SWAPPED else image
