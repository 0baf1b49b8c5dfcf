"""EXIF orientation, and its effect on pixels and crops."""

import io
import warnings
from typing import Any

import torch

from trainer.data.formats.crop import Box

UPRIGHT = 1
_TAG = 0x0112
# A JPEG or PNG without any of these markers has no orientation; else PIL reads it.
_SIGNS = (b"Exif\0", b"eXIf", b"Raw profile type exif", b"adobe.com/xap", b"com.adobe.xmp")
SWAPPED = 5  # from 5, height and width are exchanged
_ROWS, _COLUMNS = (3, 4, 6, 7), (2, 3, 7, 8)


def orientation(data: bytes | bytearray, formats: tuple[str, ...] = ("JPEG", "PNG")) -> int:
    """Returns the orientation by EXIF or XMP, 1 to 8; 1 (upright) if there is none or it is invalid.

    Args:
        data: Bytes of the file. The result is 1 for TIFF, which PIL turns itself.
        formats: Formats that PIL may read.
    """
    if data.startswith((b"\xff\xd8", b"\x89PNG")) and not any(sign in data for sign in _SIGNS):
        return UPRIGHT
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=formats) as file:
                return UPRIGHT if file.format == "TIFF" else orientation_of(file)
    except Exception:  # decoding gives the reason
        return UPRIGHT


def orientation_of(file: Any) -> int:
    """Returns the orientation of an image that PIL has opened; see `orientation`."""
    try:
        value = file.getexif().get(_TAG, UPRIGHT)
        return int(value) if value in range(2, 9) else UPRIGHT
    except Exception:  # PIL raises any exception for damaged tags; the pixels may be fine
        return UPRIGHT


def turned_size(orientation: int, height: int, width: int) -> tuple[int, int]:
    """Returns height and width of the upright image."""
    return (width, height) if orientation >= SWAPPED else (height, width)


def stored_box(box: Box, orientation: int, height: int, width: int) -> Box:
    """Maps a crop of the upright image to one of the stored image, whose height and width are given."""
    if orientation >= SWAPPED:
        box = Box(box.left, box.top, box.width, box.height)
    top, left = box.top, box.left
    if orientation in _ROWS:
        top = height - top - box.height
    if orientation in _COLUMNS:
        left = width - left - box.width
    return Box(top, left, box.height, box.width)


def apply_orientation(image: torch.Tensor, orientation: int) -> torch.Tensor:
    """Makes an image (…, height, width) or a crop of it upright, as PIL's `ImageOps.exif_transpose`."""
    axes = [axis for axis, which in ((-2, _ROWS), (-1, _COLUMNS)) if orientation in which]
    image = image.flip(axes) if axes else image
    return image.transpose(-2, -1) if orientation >= SWAPPED else image
