"""Batches travel in a ring: fixed slots in anonymous shared memory that loader workers write into.

A worker hands over a batch number, not the batch. Batch b lies in slot b mod slots, so nothing has to be
agreed. The memory is anonymous: it works in a container whose /dev/shm has 64 MB, where both of torch's
sharing strategies end with a bus error (pytorch#5040).
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
        fields: The parts of a batch, with shapes that include the micro-batch dimension.
        slots: Number of slots.
        inherited: True where workers are forked and so share the mapping; otherwise it is backed by a
            memory file whose descriptor is sent to them.
    """

    def __init__(self, fields: Mapping[str, Field], slots: int, inherited: bool) -> None:
        """Maps the memory; pages are taken when first written."""
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
        """The slot of a batch, as one writable array per field."""
        return self._views[batch % self.slots]

    def slot(self, batch: int) -> torch.Tensor:
        """The slot of a batch as bytes: uint8 (slot_bytes,), no copy."""
        return self._bytes[batch % self.slots]

    def unpack(self, slot: torch.Tensor) -> dict[str, torch.Tensor]:
        """The fields of a slot that may have been copied to a device; no copy."""
        tensors = {}
        for name, field in self.fields.items():
            dtype = torch.from_numpy(np.empty(0, field.dtype)).dtype
            size = math.prod(field.shape) * field.dtype.itemsize
            part = slot[self.offsets[name] : self.offsets[name] + size]
            tensors[name] = part.view(dtype).view(field.shape)
        return tensors

    def pin(self) -> bool:
        """Page-locks the slots for CUDA, in place; False where the driver refuses (ulimit memlock)."""
        size = self.slot_bytes * self.slots
        return page_lock(torch.cuda.cudart(), str(torch.version.cuda), self._bytes.data_ptr(), size)

    def unpin(self) -> None:
        """Undoes `pin`."""
        torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())

    def close(self) -> None:
        """Lets go of the file; the memory goes with the last tensor in it."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def __getstate__(self) -> dict[str, Any]:
        """Called when a worker is started without fork: sends the descriptor, not the bytes."""
        kept = {name: self.__dict__[name] for name in ("fields", "slots", "offsets", "slot_bytes")}
        return kept | {"_file": reduction.DupFd(self._file)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Maps the same memory in a worker."""
        self.__dict__.update(state)
        self._file = state["_file"].detach()
        self._map()
