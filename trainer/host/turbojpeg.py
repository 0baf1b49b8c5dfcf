"""libjpeg-turbo's own library, where it is installed. No torch: `trainer doctor` asks, too."""

import ctypes
import functools
import sys
from typing import NamedTuple

_NAME = "libturbojpeg.so.0"


class Region(ctypes.Structure):
    """`tjregion` of turbojpeg.h, in pixels."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("x", "y", "w", "h"))


class TurboJpeg(NamedTuple):
    """What was found.

    Attributes:
        path: "" if there is none.
        code: Its functions; None if it has none of TurboJPEG 3, whose decoder takes a part of an image.
    """

    path: str
    code: ctypes.CDLL | None


@functools.cache
def find_turbojpeg() -> TurboJpeg:
    """Looks for it in this Python's environment, then among the system's libraries."""
    found = TurboJpeg("", None)
    for folder in dict.fromkeys((f"{sys.prefix}/lib/", f"{sys.base_prefix}/lib/", "")):
        path = folder + _NAME
        try:
            code = ctypes.CDLL(path)
        except OSError:
            continue
        try:
            _declare(code)
        except AttributeError:
            found = TurboJpeg(path, None)
            continue
        return TurboJpeg(path, code)
    return found


def _declare(code: ctypes.CDLL) -> None:
    number, pointer, size = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
    code.tj3Init.argtypes, code.tj3Init.restype = (number,), pointer
    code.tj3Destroy.argtypes, code.tj3Destroy.restype = (pointer,), None
    code.tj3DecompressHeader.argtypes = (pointer, pointer, size)
    code.tj3Get.argtypes = (pointer, number)
    code.tj3SetCroppingRegion.argtypes = (pointer, Region)
    code.tj3Decompress8.argtypes = (pointer, pointer, size, pointer, number, number)
