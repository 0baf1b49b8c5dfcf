"""The one place where images are decoded: bytes of a file in, uint8 pixels out.

JPEG and ordinary PNG go through torchvision's libjpeg-turbo and libpng, everything else through PIL. Both
refuse a file that was cut off; neither is asked to guess.
"""

import io
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torchvision import io as tvio

from trainer.data.corrupt import Corrupt
from trainer.data.formats.crop import Box

# PIL's own limit against decompression bombs: 89 megapixels.
LARGEST_IMAGE = 89_478_485

_RESIZE = torch.ops.aten._upsample_bilinear2d_aa
_BASELINE, _PROGRESSIVE = (0xC0, 0xC1), 0xC2
_NO_LENGTH = (0x01, *range(0xD0, 0xD9))
_NOT_FRAMES = (0xC4, 0xC8, 0xCC)
_PNG = b"\x89PNG\r\n\x1a\n"
# Not all that PIL knows: its plugin for EPS runs Ghostscript.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_RGB = tvio.ImageReadMode.RGB


class Header(NamedTuple):
    """What the first bytes of a file say.

    Attributes:
        kind: "jpeg" or "png" where torchvision decodes it, else "other".
        height: In pixels; 0 for "other", as PIL will say.
        width: Likewise.
    """

    kind: str
    height: int
    width: int


def look(data: bytes | bytearray) -> Header:
    """Reads kind and size of an image without decoding it: 3 us.

    Raises:
        Corrupt: If it is empty, or a JPEG without a frame.
    """
    if not data:
        raise Corrupt("the file is empty")
    if data.startswith(_PNG) and data[12:16] == b"IHDR":
        return Header("png", int.from_bytes(data[20:24], "big"), int.from_bytes(data[16:20], "big"))
    if not data.startswith(b"\xff\xd8\xff"):
        return Header("other", 0, 0)
    # https://www.w3.org/Graphics/JPEG/itu-t81.pdf, annex B: a marker, then the length of its segment.
    at, size = 2, len(data)
    while at + 9 < size:
        if data[at] != 0xFF:
            break
        marker = data[at + 1]
        if marker == 0xFF:  # fill bytes
            at += 1
        elif marker in _NO_LENGTH:
            at += 2
        elif 0xC0 <= marker <= 0xCF and marker not in _NOT_FRAMES:
            height, width = (
                int.from_bytes(data[at + 5 : at + 7], "big"),
                int.from_bytes(data[at + 7 : at + 9], "big"),
            )
            known = marker in (*_BASELINE, _PROGRESSIVE) and data[at + 9] in (1, 3)
            return Header("jpeg" if known else "other", height, width)
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    raise Corrupt("a JPEG without a frame: cut off, or damaged")


def cut_out(
    data: bytearray, choose: Callable[[int, int], Box], side: int = 0, scaled: bool = False
) -> torch.Tensor:
    """Decodes an image and takes a part of it.

    Args:
        data: The file.
        choose: Gives the part, from height and width.
        side: Of the square that the part will be resized to, in pixels.
        scaled: Whether a JPEG may be decoded at 1/2, 1/4 or 1/8 of its size where the part is at least that
            much larger than `side` both ways. That is cheaper, and not the same pixels.

    Returns:
        uint8 (1, 3, height, width), channels last in memory; a view.

    Raises:
        Corrupt: If it can't be decoded, with the reason.
    """
    header = look(data)
    if header.kind == "other":
        return _with_pil(data, choose)
    if header.height * header.width > LARGEST_IMAGE:
        raise Corrupt(f"{header.width:,} x {header.height:,} pixels are too many")
    if header.height == 0 or header.width == 0:
        raise Corrupt("it has no pixels")
    box = choose(header.height, header.width)
    if scaled and header.kind == "jpeg" and side and (shrink := _shrink(box, side)) > 1:
        return _with_pil(data, lambda *_: Box(*(edge // shrink for edge in box)), shrink)
    try:
        encoded = torch.frombuffer(data, dtype=torch.uint8)
        decode = tvio.decode_jpeg if header.kind == "jpeg" else tvio.decode_png
        image: torch.Tensor = decode(encoded, _RGB)
    except RuntimeError as error:
        if "allocat" in str(error):
            raise MemoryError(str(error)) from error
        if header.kind == "png":
            return _with_pil(data, choose)
        raise Corrupt(_first_line(error)) from error
    if image.dtype != torch.uint8:
        image = (image.to(torch.int32) >> 8).to(torch.uint8)
    return image[None, :, box.top : box.top + box.height, box.left : box.left + box.width]


def whole(data: bytearray) -> torch.Tensor:
    """Decodes an image; see `cut_out`."""
    return cut_out(data, lambda height, width: Box(0, 0, height, width))


def resize(image: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Bilinear with antialiasing, as PIL does it: uint8 (1, 3, h, w) to uint8 (1, 3, height, width)."""
    # Contiguous first, with the batch's stride as well: others take a path that is half as fast.
    image = image[0].permute(1, 2, 0).contiguous()[None].permute(0, 3, 1, 2)
    resized: torch.Tensor = _RESIZE(image, [height, width], False, None, None)
    return resized


def _shrink(box: Box, side: int) -> int:
    most = min(box.height, box.width) // side
    return max((by for by in (8, 4, 2) if by <= most), default=1)


def _with_pil(data: bytearray, choose: Callable[[int, int], Box], shrink: int = 1) -> torch.Tensor:
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=_FORMATS) as file:
                if shrink > 1:
                    file.draft("RGB", (file.width // shrink, file.height // shrink))
                pixels = _pixels(file)
    except (MemoryError, Corrupt):
        raise
    except Image.DecompressionBombWarning as error:
        raise Corrupt("it has too many pixels") from error
    except Exception as error:
        # Its plugins raise whatever struct, zlib and their own arithmetic do; the bytes are here already, so
        # it is never an error of reading.
        raise Corrupt(_first_line(error)) from error
    box = choose(*pixels.shape[:2])
    cut = pixels[box.top : box.top + box.height, box.left : box.left + box.width]
    return torch.from_numpy(cut).permute(2, 0, 1)[None]


def _pixels(file: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """uint8 (height, width, 3), of the first frame."""
    if file.mode.startswith("I;16"):
        gray = (np.asarray(file).astype(np.uint16) >> 8).astype(np.uint8)
        return np.repeat(gray[:, :, None], 3, axis=2)
    if file.mode in ("I", "F"):
        if file.format != "PPM":
            raise Corrupt("pixels of 32 bits, whose range nobody knows")
        gray = (np.asarray(file) >> 8).astype(np.uint8)
        return np.repeat(gray[:, :, None], 3, axis=2)
    return np.array(file.convert("RGB"))


def _first_line(error: Exception) -> str:
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"not a readable image ({line[:120]})"
