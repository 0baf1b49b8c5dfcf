"""Decoding of images: bytes of a file to uint8 pixels.

JPEG and ordinary PNG are decoded by torchvision's libjpeg-turbo and libpng; other formats, and files that
these refuse, by PIL, which refuses a truncated file.
"""

import ctypes
import io
import logging
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from trainer.data.formats.signatures import DAMAGED, what_it_is

# PIL's limit for decompression bombs, in pixels; it warns above half of it.
LARGEST_IMAGE = 2 * 89_478_485

_RESIZE = torch.ops.aten._upsample_bilinear2d_aa
_BASELINE, _PROGRESSIVE = (0xC0, 0xC1), 0xC2
_SEGMENTS = 1 << 16  # segments that are searched for the frame header
_NO_LENGTH = (0x01, *range(0xD0, 0xD9))
_NOT_FRAMES = (0xC4, 0xC8, 0xCC)
_PNG = b"\x89PNG\r\n\x1a\n"
# A subset of PIL's formats: its plugin for EPS runs Ghostscript.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_OPTIONAL = {"AVIF": "avif", "JPEG2000": "jpg_2000"}  # format: feature of PIL's build
_RGB = tvio.ImageReadMode.RGB
_DARK = 1 << 12  # above all values of a 16-bit image that uses 12 bits
logging.getLogger("PIL").addHandler(logging.NullHandler())  # PIL also raises what it logs
_ADDRESS = re.compile(r"<([\w.]+)[^<>]* at 0x[0-9a-f]+>")


class Header(NamedTuple):
    """Kind and size of an image by its first bytes.

    Attributes:
        kind: "jpeg" or "png" if torchvision decodes it, else "other".
        height: Height in pixels; 0 for "other".
        width: Width in pixels; 0 for "other".
    """

    kind: str
    height: int
    width: int


_OTHER = Header("other", 0, 0)


def look(data: bytes | bytearray) -> Header:
    """Reads kind and size of an image without decoding it, in 3 us."""
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
    upright: bool = False,
) -> torch.Tensor:
    """Decodes an image and returns a crop of it.

    Args:
        data: Bytes of the file.
        choose: Returns the crop from height and width.
        side: Side of the square that the crop will be resized to, in pixels.
        scaled: True if a JPEG may be decoded at 1/2, 1/4 or 1/8 of its size where the crop is at least that
            much larger than `side` both ways. This is cheaper and gives other pixels; the crop is then
            aligned to the divisor, see `snapped_cut`.
        upright: True to apply the EXIF orientation.

    Returns:
        uint8 (1, 3, height, width), channels last in memory; a view.

    Raises:
        Corrupt: If the image can't be decoded, with the reason.
    """
    if not data:
        raise Corrupt("the file is empty")
    header = look(data)
    if header.height * header.width > LARGEST_IMAGE:
        raise Corrupt(_too_large(f"{header.width:,} x {header.height:,} pixels are"))
    with without_lines_of_libraries():
        decoded = None
        if header.kind != "other":
            decoded = _decoded(data, header, choose, side if scaled else 0, upright)
        image, box, turn = decoded or _with_pil(data, choose, upright)
    cut = image[:, :, box.top : box.top + box.height, box.left : box.left + box.width]
    return cut if turn == UPRIGHT else apply_orientation(cut, turn)


def decode_whole(data: bytearray, upright: bool = False) -> torch.Tensor:
    """Decodes a full image; see `cut_out`."""
    return cut_out(data, lambda height, width: Box(0, 0, height, width), upright=upright)


def resize(image: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Resizes bilinearly with antialiasing, as PIL: uint8 (1, 3, h, w) to uint8 (1, 3, height, width)."""
    # Contiguous, including the stride of the batch dimension: other layouts take a path of half the speed.
    image = image[0].permute(1, 2, 0).contiguous()[None].permute(0, 3, 1, 2)
    resized: torch.Tensor = _RESIZE(image, [height, width], False, None, None)
    return resized


def resized_middle(image: torch.Tensor, side: int, fraction: float = EVAL_CROP) -> torch.Tensor:
    """Returns the center crop for evaluation: uint8 (1, 3, h, w) to (1, 3, side, side)."""
    height, width = image.shape[2:]
    rows, columns, box = central_window(height, width, side, fraction)
    resized = resize(image, rows, columns)
    return resized[:, :, box.top : box.top + side, box.left : box.left + side]


class _Decoded(NamedTuple):
    """An image, uint8 (1, 3, height, width), the crop's box in it, and its EXIF orientation."""

    image: torch.Tensor
    box: Box
    turn: int


def _decoded(
    data: bytearray, header: Header, choose: Callable[[int, int], Box], side: int, upright: bool
) -> _Decoded | None:
    """Decodes a JPEG or PNG by torchvision; returns None if that fails or its header is wrong."""
    turn = orientation(data) if upright else UPRIGHT
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
        image = torch.from_numpy(_eight_bits(image.numpy()))
    return _Decoded(image[None], box, turn)


def _smaller(data: bytearray, header: Header, shrink: int) -> torch.Tensor | None:
    """Decodes a JPEG at 1/shrink of its size; returns None if that fails or its header is wrong."""
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
    except Exception:  # decoding at full size gives the reason
        return None


@cache
def formats() -> tuple[str, ...]:
    """Returns the formats that PIL reads, by its build."""
    from PIL import features

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of features unknown to an older PIL
        return (*_FORMATS, *(name for name, feature in _OPTIONAL.items() if features.check(feature)))


def _with_pil(data: bytearray, choose: Callable[[int, int], Box], upright: bool) -> _Decoded:
    """Decodes the first frame with PIL."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=formats()) as file:
                image = _of_rows(_pixels(file))
                turn = orientation_of(file) if upright else UPRIGHT
    except (MemoryError, Corrupt):
        raise
    except Image.DecompressionBombError as error:
        raise Corrupt(_too_large("its pixels are")) from error
    except Exception as error:
        # Plugins raise any exception of struct, zlib and their arithmetic; the bytes are in memory, so it
        # isn't a read error.
        raise Corrupt(f"not a readable image ({_reason(data, error)})") from error
    height, width = image.shape[2:]
    return _Decoded(image, stored_box(choose(*turned_size(turn, height, width)), turn, height, width), turn)


def _of_rows(pixels: npt.NDArray[np.uint8]) -> torch.Tensor:
    if not pixels.size:
        raise Corrupt("it has no pixels")
    return torch.from_numpy(pixels).permute(2, 0, 1)[None]


def _pixels(file: Any) -> npt.NDArray[np.uint8]:
    """Returns the pixels of the first frame, uint8 (height, width, 3)."""
    deep = _more_than_eight(file)  # before loading, which resets `tile`
    if file.mode.startswith("I;16") or (file.mode == "I" and file.format == "PPM"):
        gray = _eight_bits(np.asarray(file).astype(np.int32))
        return np.repeat(gray[:, :, None], 3, axis=2)
    if file.mode in ("I", "F"):
        raise Corrupt("pixels of 32 bits or with a sign, whose range isn't known; convert it to 8 or 16 bits")
    pixels = np.array(file.convert("RGB"))
    # PIL rounds PPM, so that 4095 becomes 16.
    if deep and pixels.max() < (_DARK >> 8) + (file.format == "PPM"):
        raise Corrupt(
            "16 bits a channel of which fewer are used, so that it would be (nearly) black; save it as 8 bits"
        )
    return pixels


def _more_than_eight(file: Any) -> bool:
    """True if PIL drops the lower bits of a 16-bit image: TIFF, PPM, and PNG that libpng refuses."""
    if file.format not in ("TIFF", "PPM", "PNG") or not file.tile or file.mode.startswith("I"):
        return False
    arguments = file.tile[0][3]
    parts = arguments if isinstance(arguments, tuple) else (arguments,)
    return any(
        ";16" in part if isinstance(part, str) else file.format == "PPM" and part > 255 for part in parts
    )


def _eight_bits(deep: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Returns the upper 8 of 16 bits.

    Raises:
        Corrupt: If the image uses 12 bits or fewer.
    """
    most = int(deep.max(initial=0))
    if 0 < most < _DARK:
        raise Corrupt(
            f"an image of 16 bits whose largest value is {most:,} would be (nearly) black; save it as 8 bits "
            f"(numpy: image >> {max(0, most.bit_length() - 8)})"
        )
    pixels: npt.NDArray[np.uint8] = (deep >> 8).astype(np.uint8)
    return pixels


def _too_large(what: str) -> str:
    return f"{what} too many: more than {LARGEST_IMAGE:,} aren't read; make it smaller, or cut it into tiles"


def _reason(data: bytearray, error: Exception) -> str:
    """Returns why a file can't be decoded, in one line that is the same in every run."""
    from PIL import UnidentifiedImageError

    what = what_it_is(data)
    if what and (isinstance(error, UnidentifiedImageError) or DAMAGED not in what):
        return what
    if isinstance(error, UnidentifiedImageError):
        return f"in no format that is known here; it begins with {bytes(data[:8]).hex(' ')}"
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    line = _ADDRESS.sub(r"<\1>", line)
    line = "".join(letter if letter.isprintable() else "?" for letter in line)[:120]
    return f"{what.partition(' that')[0]}: {line}" if what else line


_lock = threading.Lock()
_inside = 0


@cache
def _streams() -> tuple[ctypes.c_void_p, int | None, int | None] | None:
    """Returns glibc's variable `stderr`, its value and a stream to /dev/null; None for another C library."""
    try:
        if not (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc"):
            return None
        libc = ctypes.CDLL(None)
        variable = ctypes.c_void_p.in_dll(libc, "stderr")
        libc.fopen.restype = ctypes.c_void_p
        nowhere = libc.fopen(b"/dev/null", b"we")
    except (ValueError, OSError, AttributeError):  # another C library
        return None
    return (variable, variable.value, nowhere) if nowhere else None


@contextmanager
def without_lines_of_libraries() -> Iterator[None]:
    """Discards the warnings of libjpeg, libpng and libtiff, which repeat what the exceptions say.

    They print to C's `stderr`, which is replaced meanwhile. Descriptor 2 isn't touched, so that lines of
    Python and faulthandler are printed. Takes 2 to 5 us.
    """
    global _inside  # noqa: PLW0603
    streams = _streams()
    if streams is None:
        yield
        return
    variable, real, nowhere = streams
    with _lock:
        _inside += 1
        variable.value = nowhere
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                variable.value = real
