"""The one place where images are decoded: bytes of a file in, uint8 pixels out.

JPEG and ordinary PNG go through torchvision's libjpeg-turbo and libpng. Everything else, and what these
refuse, goes to PIL, whose word is the last: it refuses a file that was cut off.
"""

import io
import logging
import re
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torchvision import io as tvio

from trainer.config.data import EVAL_CROP
from trainer.data.corrupt import Corrupt
from trainer.data.formats.crop import Box, central_window, snapped_cut
from trainer.data.formats.orientation import (
    UPRIGHT,
    apply_orientation,
    orientation,
    orientation_of,
    stored_box,
    turned_size,
)
from trainer.data.formats.quiet import without_lines_of_libraries
from trainer.data.formats.records import Reading
from trainer.data.formats.signatures import DAMAGED, what_it_is

# What PIL takes for a decompression bomb; above half of it, it warns.
LARGEST_IMAGE = 2 * 89_478_485
# Bytes that decoding takes at most: the image and its copies, 15 a pixel of the largest. Measured in
# docs/results/attacks.md: some formats take more for each pixel, so they may have fewer.
_MOST_BYTES, _COPIES = 15 * LARGEST_IMAGE, 15
_COPIES_OF = {"WEBP": 24, "JPEG2000": 28, "AVIF": 20}

_RESIZE = torch.ops.aten._upsample_bilinear2d_aa
_BASELINE, _PROGRESSIVE = (0xC0, 0xC1), 0xC2
_SCANS, _SMALLEST_SCAN = 64, 10  # of an image of as many pixels as are read; bytes
_SEGMENTS = 1 << 16  # that are looked at for the one with the size
_NO_LENGTH = (0x01, *range(0xD0, 0xD9))
_NOT_FRAMES = (0xC4, 0xC8, 0xCC)
_PNG = b"\x89PNG\r\n\x1a\n"
# Not all that PIL knows: its plugin for EPS runs Ghostscript.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_OPTIONAL = {"AVIF": "avif", "JPEG2000": "jpg_2000"}  # and the feature that PIL is built with for it
_RGB = tvio.ImageReadMode.RGB
_DARK = 1 << 12  # what a 16-bit image that uses 12 bits doesn't reach
logging.getLogger("PIL").addHandler(logging.NullHandler())  # what it logs, it raises as well
_ADDRESS = re.compile(r"<([\w.]+)[^<>]* at 0x[0-9a-f]+>")


class Header(NamedTuple):
    """Facts from the first bytes of a file.

    Attributes:
        kind: "jpeg" or "png" where torchvision decodes it, else "other".
        height: In pixels; 0 for "other", as PIL will say.
        width: Likewise.
    """

    kind: str
    height: int
    width: int


_OTHER = Header("other", 0, 0)


def look(data: bytes | bytearray) -> Header:
    """Reads kind and size of an image without decoding it: 3 us. What it can't make out is "other"."""
    if data.startswith(_PNG) and data[12:16] == b"IHDR":
        return _sized("png", data[20:24], data[16:20])
    if not data.startswith(b"\xff\xd8\xff"):
        return _OTHER
    # https://www.w3.org/Graphics/JPEG/itu-t81.pdf, annex B: a marker, then the length of its segment.
    at, size = 2, len(data)
    for _ in range(_SEGMENTS):
        if at + 9 >= size or data[at] != 0xFF:
            break
        marker = data[at + 1]
        if marker == 0xFF:  # fill bytes
            at += 1
        elif marker in _NO_LENGTH:
            at += 2
        elif 0xC0 <= marker <= 0xCF and marker not in _NOT_FRAMES:
            known = marker in (*_BASELINE, _PROGRESSIVE) and data[at + 9] in (1, 3)
            return _sized("jpeg", data[at + 5 : at + 7], data[at + 7 : at + 9]) if known else _OTHER
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return _OTHER


def _sized(kind: str, height: bytes | bytearray, width: bytes | bytearray) -> Header:
    high, wide = int.from_bytes(height, "big"), int.from_bytes(width, "big")
    return Header(kind, high, wide) if high and wide else _OTHER


def cut_out(
    data: bytearray,
    choose: Callable[[int, int], Box],
    side: int = 0,
    scaled: bool = False,
    reading: Reading = Reading(),  # noqa: B008  (a tuple)
) -> torch.Tensor:
    """Decodes an image and takes a part of it.

    Args:
        data: The file.
        choose: Gives the part, from height and width.
        side: Of the square that the part will be resized to, in pixels.
        scaled: Whether a JPEG may be decoded at 1/2, 1/4 or 1/8 of its size where the part is at least that
            much larger than `side` both ways. That is cheaper, and not the same pixels; the part is then the
            nearest that such an image has exactly, see `snapped_cut`.
        reading: How pixels are taken.

    Returns:
        uint8 (1, 3, height, width), channels last in memory; a view.

    Raises:
        Corrupt: If it can't be decoded, with the reason.
    """
    if not data:
        raise Corrupt("the file is empty")
    header = look(data)
    if header.height * header.width > LARGEST_IMAGE:
        raise Corrupt(_too_large(f"{header.width:,} x {header.height:,} pixels are"))
    if header.kind == "jpeg":
        _check_scans(data, header.height * header.width)
    with without_lines_of_libraries():
        found = None
        if header.kind != "other":
            found = _decoded(data, header, choose, side if scaled else 0, reading)
        image, box, turn = found or _with_pil(data, choose, reading)
    cut = image[:, :, box.top : box.top + box.height, box.left : box.left + box.width]
    return cut if turn == UPRIGHT else apply_orientation(cut, turn)


def _check_scans(data: bytearray, pixels: int) -> None:
    """Each scan of a progressive JPEG costs as much as the whole image; a few bytes make one."""
    most = _SCANS * LARGEST_IMAGE
    if len(data) // _SMALLEST_SCAN * pixels > most and (scans := data.count(b"\xff\xda")) * pixels > most:
        raise Corrupt(f"a JPEG of {scans:,} scans, which would take minutes")


def decode_whole(data: bytearray, reading: Reading = Reading()) -> torch.Tensor:  # noqa: B008
    """Decodes an image; see `cut_out`."""
    return cut_out(data, lambda height, width: Box(0, 0, height, width), reading=reading)


def resize(image: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Bilinear with antialiasing, as PIL does it: uint8 (1, 3, h, w) to uint8 (1, 3, height, width)."""
    # Contiguous first, with the batch's stride as well: others take a path that is half as fast.
    image = image[0].permute(1, 2, 0).contiguous()[None].permute(0, 3, 1, 2)
    resized: torch.Tensor = _RESIZE(image, [height, width], False, None, None)
    return resized


def resized_middle(image: torch.Tensor, side: int, share: float = EVAL_CROP) -> torch.Tensor:
    """The central square of an image as evaluation sees it: uint8 (1, 3, h, w) to (1, 3, side, side)."""
    height, width = image.shape[2:]
    rows, columns, box = central_window(height, width, side, share)
    resized = resize(image, rows, columns)
    return resized[:, :, box.top : box.top + side, box.left : box.left + side]


class _Decoded(NamedTuple):
    """An image, uint8 (1, 3, height, width), where the part that is wanted lies in it, and orientation."""

    image: torch.Tensor
    box: Box
    turn: int


def _decoded(
    data: bytearray, header: Header, choose: Callable[[int, int], Box], side: int, reading: Reading
) -> _Decoded | None:
    """A JPEG or PNG, maybe at a part of its size; None if it is refused, or isn't what its header says."""
    turn = orientation(data) if reading.upright else UPRIGHT
    kind, height, width = header
    box = stored_box(choose(*turned_size(turn, height, width)), turn, height, width)
    if side and kind == "jpeg":
        cut, shrink = snapped_cut(box, side, height, width)
        if shrink > 1 and (small := _smaller(data, header, shrink)) is not None:
            return _Decoded(small, Box(*(edge // shrink for edge in cut)), turn)
    try:
        encoded = torch.frombuffer(data, dtype=torch.uint8)
        decode = tvio.decode_jpeg if kind == "jpeg" else tvio.decode_png
        image: torch.Tensor = decode(encoded, _RGB)
    except RuntimeError as error:
        if "allocat" in str(error):
            raise MemoryError(str(error)) from error
        return None
    if image.shape[1:] != (height, width):
        return None
    if image.dtype != torch.uint8:
        image = torch.from_numpy(_eight_bits(image.numpy(), reading.bits))
    return _Decoded(image[None], box, turn)


def _smaller(data: bytearray, header: Header, shrink: int) -> torch.Tensor | None:
    """A JPEG at a part of its size; None if it can't be decoded so, or isn't what its header says."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=("JPEG",)) as file:
                if file.size != (header.width, header.height):
                    return None
                file.draft("RGB", (file.width // shrink, file.height // shrink))
                return _of_rows(np.array(file.convert("RGB")))
    except MemoryError:
        raise
    except Exception:  # who decodes it whole says what is wrong
        return None


@cache
def formats() -> tuple[str, ...]:
    """Returns the formats that PIL, as it is built here, is asked to read."""
    from PIL import features

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of features that an older one doesn't know
        return (*_FORMATS, *(name for name, feature in _OPTIONAL.items() if features.check(feature)))


def _with_pil(data: bytearray, choose: Callable[[int, int], Box], reading: Reading) -> _Decoded:
    """Decodes the first frame with PIL."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=formats()) as file:
                _check_room(file)
                image = _of_rows(_pixels(file, reading.bits))
                turn = orientation_of(file) if reading.upright else UPRIGHT
    except (MemoryError, Corrupt):
        raise
    except Image.DecompressionBombError as error:
        raise Corrupt(_too_large("its pixels are")) from error
    except Exception as error:
        # Its plugins raise whatever struct, zlib and their own arithmetic do; the bytes are here already, so
        # it is never an error of reading.
        raise Corrupt(f"not a readable image ({_reason(data, error)})") from error
    height, width = image.shape[2:]
    return _Decoded(image, stored_box(choose(*turned_size(turn, height, width)), turn, height, width), turn)


def _check_room(file: Any) -> None:
    """A few bytes may be gigabytes of pixels.

    Raises:
        Corrupt: If decoding takes more than is given to it.
    """
    pixels, most = file.width * file.height, _MOST_BYTES // _COPIES_OF.get(file.format, _COPIES)
    if pixels > most:
        raise Corrupt(_too_large(f"{file.width:,} x {file.height:,} pixels are", most, f" of {file.format}"))


def _of_rows(pixels: npt.NDArray[np.uint8]) -> torch.Tensor:
    if not pixels.size:
        raise Corrupt("it has no pixels")
    return torch.from_numpy(pixels).permute(2, 0, 1)[None]


def _pixels(file: Any, bits: int) -> npt.NDArray[np.uint8]:
    """uint8 (height, width, 3), of the first frame."""
    deep = _more_than_eight(file)  # before it is loaded, which forgets it
    if file.mode.startswith("I;16") or (file.mode == "I" and file.format == "PPM"):
        gray = _eight_bits(np.asarray(file).astype(np.int32), bits)
        return np.repeat(gray[:, :, None], 3, axis=2)
    if file.mode in ("I", "F"):
        raise Corrupt("pixels of 32 bits or with a sign, whose range isn't known; convert it to 8 or 16 bits")
    pixels = np.array(file.convert("RGB"))
    # Rounded, not cut off: of PPM 4095 is as 16 of 255.
    if deep and bits < 16 and (bits or pixels.max() < (_DARK >> 8) + (file.format == "PPM")):
        raise Corrupt(
            "16 bits a channel of which PIL takes the upper 8, so that it would be (nearly) black; save "
            "it as PNG, or set data.image_bits=16 if it is as dark as that"
            if not bits
            else "16 bits a channel, of which PIL takes the upper 8 of such a file; save it as PNG"
        )
    return pixels


def _more_than_eight(file: Any) -> bool:
    """Whether PIL drops the lower bits of an image by itself: of TIFF, PPM, PNG that libpng refuses."""
    if file.format not in ("TIFF", "PPM", "PNG") or not file.tile or file.mode.startswith("I"):
        return False
    arguments = file.tile[0][3]
    parts = arguments if isinstance(arguments, tuple) else (arguments,)
    return any(
        ";16" in part if isinstance(part, str) else file.format == "PPM" and part > 255 for part in parts
    )


def _eight_bits(deep: npt.NDArray[Any], bits: int) -> npt.NDArray[np.uint8]:
    """The upper 8 of the bits that are in use.

    Raises:
        Corrupt: If nobody said how many are, and hardly anything would be left.
    """
    most = int(deep.max(initial=0))
    if not bits and 0 < most < _DARK:
        likely = next(width for width in (8, 10, 12) if most < 1 << width)
        raise Corrupt(
            f"an image of 16 bits whose largest value is {most:,} would be (nearly) black; set "
            f"data.image_bits to the bits in use ({likely}?), or to 16 if it is as dark as that"
        )
    shifted = deep >> ((bits or 16) - 8)  # such an image may take a gigabyte: no further copy
    pixels: npt.NDArray[np.uint8] = np.minimum(shifted, 255, out=shifted).astype(np.uint8)
    return pixels


def _too_large(what: str, most: int = LARGEST_IMAGE, of: str = "") -> str:
    return f"{what} too many: more than {most:,}{of} aren't read; make it smaller, or cut it into tiles"


def _reason(data: bytearray, error: Exception) -> str:
    """Says what is wrong with a file, in one line that is the same in every run."""
    from PIL import UnidentifiedImageError

    what = what_it_is(data)
    if what.startswith("AVIF") and "AVIF" in formats():
        what = f"an AVIF {DAMAGED}"
    if what and (isinstance(error, UnidentifiedImageError) or DAMAGED not in what):
        return what
    if isinstance(error, UnidentifiedImageError):
        return f"in no format that is known here; it begins with {bytes(data[:8]).hex(' ')}"
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    line = _ADDRESS.sub(r"<\1>", line)
    line = "".join(letter if letter.isprintable() else "?" for letter in line)[:120]
    return f"{what.partition(' that')[0]}: {line}" if what else line
