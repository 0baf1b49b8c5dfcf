"""Memory that is page-locked for CUDA where it lies: torch's allocator of such memory takes powers of two."""

import contextlib
import ctypes
from typing import Any


def page_lock(cudart: Any, version: str, address: int, size: int) -> bool:
    """Page-locks memory; False where the driver refuses (ulimit memlock).

    Args:
        cudart: `torch.cuda.cudart()`.
        version: Of CUDA: `torch.version.cuda`.
        address: Of the first byte.
        size: In bytes.
    """
    if int(cudart.cudaHostRegister(address, size, 0)) == 0:
        return True
    # The error stays pending, and torch would raise it at some later kernel: read it away.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(f"libcudart.so.{version.partition('.')[0]}").cudaGetLastError()
    return False
