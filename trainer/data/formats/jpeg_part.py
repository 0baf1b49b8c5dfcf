"""A part of a JPEG alone, by libjpeg-turbo's own library (TurboJPEG 3), where that is installed.

Outside of the part no more than Huffman's codes is decoded, and below it nothing. ctypes calls it without
the GIL, and nothing has to be compiled. Pixels and errors are those of torchvision's decoder, to which all is
left that could give others.
"""

import re

import torch

from trainer.data.formats.crop import Box
from trainer.host.turbojpeg import Region, find_turbojpeg

# turbojpeg.h: TJINIT_DECOMPRESS; TJPARAM_SUBSAMP, _JPEGWIDTH and _JPEGHEIGHT; TJPF_RGB.
_DECOMPRESS, _SUBSAMPLING, _WIDTH, _HEIGHT, _RGB = 1, 4, 5, 6, 0
# Pixels across a block of 4:4:4, 4:2:2, 4:2:0 and gray. Of others, versions interpolate the colors otherwise.
_ACROSS = {0: 8, 1: 16, 2: 16, 3: 8}
_SCAN, _END = b"\xff\xda", 0xD9
# What ends the codes of a scan: neither a byte of them that is 0xFF, nor a mark to restart at.
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")


def decode_part(data: bytearray, height: int, width: int, box: Box) -> torch.Tensor | None:
    """Decodes a part of a JPEG.

    Args:
        data: The file.
        height: Of the image, as its header says.
        width: Likewise.
        box: The part, inside of the image.

    Returns:
        uint8 (box.height, box.width, 3), a view: the pixels of the whole image there, bit by bit. None
        without the library, and for whatever it doesn't decode without a complaint.
    """
    code = find_turbojpeg().code
    if code is None or not _is_one_scan(data):
        return None
    encoded = torch.frombuffer(data, dtype=torch.uint8)
    file = encoded.data_ptr(), len(data)
    handle = code.tj3Init(_DECOMPRESS)
    try:
        if not handle or code.tj3DecompressHeader(handle, *file):
            return None
        across = _ACROSS.get(code.tj3Get(handle, _SUBSAMPLING))
        if across is None or (height, width) != (code.tj3Get(handle, _HEIGHT), code.tj3Get(handle, _WIDTH)):
            return None
        # Whole blocks, with a pixel more on both sides: chroma is interpolated between neighbors.
        left = max(0, box.left - 1) // across * across
        right = min(width, -(-(box.left + box.width + 1) // across) * across)
        if code.tj3SetCroppingRegion(handle, Region(left, box.top, right - left, box.height)):
            return None
        pixels = torch.empty((box.height, right - left, 3), dtype=torch.uint8)
        if code.tj3Decompress8(handle, *file, pixels.data_ptr(), 0, _RGB):
            return None
    finally:
        code.tj3Destroy(handle)
    return pixels[:, box.left - left : box.left - left + box.width]


def _is_one_scan(data: bytearray) -> bool:
    """Whether the image ends where the codes of its first scan do: what lies below the part isn't looked at.

    Not so of a progressive file, of one cut off, and where bits flipped so that the decoder of the whole
    comes upon a marker that it doesn't know.
    """
    scan = data.find(_SCAN)
    end = _MARKER.search(data, scan + len(_SCAN)) if scan >= 0 else None
    return end is not None and data[end.start() + 1] == _END
