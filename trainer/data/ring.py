"""Ring of fixed slots in anonymous shared memory, which loader workers fill with batches.

A loader worker sends the number of a batch, not the batch; batch b is in slot b mod slots. Anonymous memory
isn't limited by /dev/shm, which has 64 MB in a container by default and where both of torch's sharing
strategies end with a bus error (pytorch#5040).
"""

import math
import mmap
import os
from collections.abc import Mapping
from multiprocessing import reduction
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainer.data.dataset import Field
from trainer.data.shared import anonymous_file
from trainer.host.page_lock import page_lock

_ALIGNMENT = 64


class Ring:
    """Slots of one fixed layout.

    Args:
        fields: Fields of a batch, with shapes that include the micro-batch dimension.
        slots: Number of slots.
        inherited: True if workers are forked and so inherit the mapping; otherwise it is backed by a memory
            file whose descriptor is sent to them.
    """

    def __init__(self, fields: Mapping[str, Field], slots: int, inherited: bool) -> None:
        """Maps the memory; pages are allocated when first written."""
        self.fields = dict(fields)
        self.slots = slots
        self.offsets: dict[str, int] = {}
        offset = 0
        for name, field in self.fields.items():
            self.offsets[name] = offset
            size = math.prod(field.shape) * field.dtype.itemsize
            offset += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.slot_bytes = offset
        self._file = -1
        if not inherited:
            self._file = anonymous_file()
            os.ftruncate(self._file, self.slot_bytes * slots)
        self._map()

    def _map(self) -> None:
        self._memory = mmap.mmap(self._file, self.slot_bytes * self.slots)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8).view(self.slots, self.slot_bytes)
        self._views = [self._slot_views(slot) for slot in range(self.slots)]

    def _slot_views(self, slot: int) -> dict[str, npt.NDArray[np.generic]]:
        start = slot * self.slot_bytes
        return {
            name: np.frombuffer(
                self._memory, field.dtype, math.prod(field.shape), start + self.offsets[name]
            ).reshape(field.shape)
            for name, field in self.fields.items()
        }

    def arrays(self, batch: int) -> dict[str, npt.NDArray[np.generic]]:
        """Returns the slot of a batch as one writable array per field."""
        return self._views[batch % self.slots]

    def slot(self, batch: int) -> torch.Tensor:
        """Returns the slot of a batch as bytes, uint8 (slot_bytes,), without a copy."""
        return self._bytes[batch % self.slots]

    def unpack(self, slot: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the fields of a slot, on whichever device it is, as views."""
        tensors = {}
        for name, field in self.fields.items():
            dtype = torch.from_numpy(np.empty(0, field.dtype)).dtype
            size = math.prod(field.shape) * field.dtype.itemsize
            part = slot[self.offsets[name] : self.offsets[name] + size]
            tensors[name] = part.view(dtype).view(field.shape)
        return tensors

    def pin(self) -> bool:
        """Page-locks the slots for CUDA in place; returns False if the driver refuses (ulimit memlock)."""
        size = self.slot_bytes * self.slots
        return page_lock(torch.cuda.cudart(), str(torch.version.cuda), self._bytes.data_ptr(), size)

    def unpin(self) -> None:
        """Undoes `pin`."""
        torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())

    def close(self) -> None:
        """Closes the memory file; the memory is freed with the last tensor in it."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def __getstate__(self) -> dict[str, Any]:
        """Pickles the file descriptor instead of the bytes, for workers that aren't forked."""
        kept = {name: self.__dict__[name] for name in ("fields", "slots", "offsets", "slot_bytes")}
        return kept | {"_file": reduction.DupFd(self._file)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Maps the same memory in a loader worker."""
        self.__dict__.update(state)
        self._file = state["_file"].detach()
        self._map()
