"""Suppression of lines that C libraries write to the terminal."""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

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
