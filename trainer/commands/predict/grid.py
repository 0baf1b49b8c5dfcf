"""Draws pictures side by side with captions, as one image file."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.errors import BadInputError
from trainer.host.files import written_whole
from trainer.host.here import path_shown

SIDE = 128  # of a picture
_LINE = 14
_GAP = 12
_MOST = 400  # pictures
_LETTERS = 20  # of a caption's line
_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
_INK, _FAINT, _BAD = (17, 17, 17), (110, 110, 110), (190, 40, 40)

Caption = tuple[str, str, bool]


def check_picture(out: Path | None) -> None:
    """Refuses a name that no picture can be written to, before anything is computed.

    Raises:
        BadInputError: If the name has no suffix of an image format, or its folder doesn't exist.
    """
    if out is None:
        return
    if out.suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp"):
        raise BadInputError(f"--out {out}: give a file that ends in .png or .jpg")
    if not out.parent.is_dir():
        raise BadInputError(f"--out {out}: there is no folder {out.parent}; make it, or give another")


def write_grid(
    out: Path, images: Sequence[npt.NDArray[np.uint8]], captions: Sequence[Caption], side: int = SIDE
) -> None:
    """Writes the pictures as one file and prints its name.

    Args:
        out: The file; its suffix says the format.
        images: uint8 (height, width, 1 or 3), of any sizes.
        captions: For each two lines, and whether something is wrong.
        side: Width and height of a picture, in pixels.

    Raises:
        BadInputError: If it can't be written.
    """
    picture = grid(images[:_MOST], captions[:_MOST], side)
    try:
        with written_whole(out) as beside:
            picture.save(beside, format=_FORMATS[out.suffix.lower()])
    except OSError as error:
        raise BadInputError(f"--out {out}: can't be written ({error.strerror}); give another") from error
    left = f"; the first {_MOST} of {len(images):,}" if len(images) > _MOST else ""
    print(f"{path_shown(out.absolute())} ({picture.width} x {picture.height}{left})")


def grid(images: Sequence[npt.NDArray[np.uint8]], captions: Sequence[Caption], side: int = SIDE) -> Any:
    """Returns the picture as a PIL image; see `write_grid`."""
    from PIL import Image, ImageDraw, ImageFont

    columns = max(1, math.ceil(math.sqrt(len(images) * 1.3)))
    rows = math.ceil(len(images) / columns)
    wide, high = side + _GAP, side + 2 * _LINE + _GAP
    page = Image.new("RGB", (columns * wide + _GAP, rows * high + _GAP), "white")
    draw, font = ImageDraw.Draw(page), ImageFont.load_default()
    for number, (pixels, (first, second, bad)) in enumerate(zip(images, captions, strict=True)):
        left, top = _GAP + number % columns * wide, _GAP + number // columns * high
        picture = fitted(Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels), side)
        page.paste(picture.convert("RGB"), (left + (side - picture.width) // 2, top))
        if bad:
            draw.rectangle((left - 2, top - 2, left + side + 1, top + side + 1), outline=_BAD, width=2)
        draw.text((left, top + side + 1), _plain(first), fill=_BAD if bad else _INK, font=font)
        draw.text((left, top + side + 1 + _LINE), _plain(second), fill=_FAINT, font=font)
    return page


def fitted(picture: Any, side: int) -> Any:
    """Scales a picture to fill the room; few pixels stay squares."""
    from PIL import Image

    factor = side / max(picture.size)
    size = tuple(max(1, round(edge * factor)) for edge in picture.size)
    how = Image.Resampling.NEAREST if factor > 2 else Image.Resampling.LANCZOS
    return picture.resize(size, how)


def _plain(line: str) -> str:
    # The font that Pillow carries knows little more than Latin letters.
    line = line.encode("latin-1", "replace").decode("latin-1")
    return line if len(line) <= _LETTERS else line[: _LETTERS - 2] + ".."
