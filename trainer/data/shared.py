"""Memory that loader workers share with the process that started them, in whichever way it did."""

import mmap
import os
import tempfile
from collections.abc import Iterable, Mapping
from multiprocessing import reduction
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainer.checkpoint.tensor_file import header_size, parse_header, safetensors_bytes


def anonymous_file() -> int:
    """Descriptor of an empty file that has no name: in memory where the system knows such files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("trainer")
    with tempfile.TemporaryFile() as file:  # macOS: deleted already
        return os.dup(file.fileno())


class Columns:
    """Named arrays in one read-only mapping of a safetensors file.

    A list of a million Python objects is copied page by page into every worker as its reference counts are
    touched (pytorch#13246), and pickled for each that isn't forked. These are in the machine once.
    """

    def __init__(self, file: int) -> None:
        """Maps a file, and closes its descriptor with the mapping.

        Raises:
            ValueError: If it isn't safetensors.
        """
        self._file = file
        size = os.fstat(file).st_size
        first = os.pread(file, 8, 0)
        start = 8 + header_size(first, size)
        slots = parse_header(os.pread(file, start - 8, 8), size - start)
        memory = mmap.mmap(file, size, prot=mmap.PROT_READ)
        self._arrays = {}
        for slot in slots:
            dtype = torch.empty(0, dtype=slot.dtype).numpy().dtype
            array = np.frombuffer(
                memory, dtype, (slot.stop - slot.start) // dtype.itemsize, start + slot.start
            )
            self._arrays[slot.name] = array.reshape(slot.shape)

    @classmethod
    def hold(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> "Columns":
        """Copies arrays into anonymous memory."""
        return cls._written(
            safetensors_bytes({name: torch.from_numpy(array) for name, array in arrays.items()})
        )

    @classmethod
    def copy(cls, data: bytes) -> "Columns":
        """Copies the content of a file, which may then be cut off without a bus error here.

        Raises:
            ValueError: If it isn't safetensors.
        """
        return cls._written([data])

    @classmethod
    def _written(cls, parts: Iterable[bytes | memoryview]) -> "Columns":
        file = anonymous_file()
        for part in parts:
            rest = memoryview(part)
            while rest:
                rest = rest[os.write(file, rest) :]
        return cls(file)

    def rows(self, samples: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
        """Copies of some samples' rows, in this order; names are cut out of what was `joined`."""
        arrays = {name: array[samples] for name, array in self._arrays.items() if name != "name"}
        if "name" in self:
            arrays |= joined([name_at(self, sample) for sample in samples.tolist()])
        return arrays

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """An array; writing to it is an error."""
        return self._arrays[name]

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def __getstate__(self) -> Any:
        """Called when a worker is started without fork: sends the descriptor, not the bytes."""
        return reduction.DupFd(self._file)

    def __setstate__(self, state: Any) -> None:
        """Maps the same memory in a worker."""
        self.__init__(state.detach())  # type: ignore[misc]

    def __del__(self) -> None:
        file, self._file = getattr(self, "_file", -1), -1
        if file >= 0:
            os.close(file)


def joined(names: list[bytes]) -> dict[str, npt.NDArray[Any]]:
    """Byte strings as two columns: "name" uint8 (all bytes,), and "name_end" int64 (n,)."""
    ends = np.cumsum([len(name) for name in names], dtype=np.int64)
    return {"name": np.frombuffer(bytearray().join(names), np.uint8), "name_end": ends}


def name_at(columns: Columns, index: int) -> bytes:
    """Returns one of the byte strings that were `joined`."""
    ends = columns["name_end"]
    start = int(ends[index - 1]) if index else 0
    return columns["name"][start : int(ends[index])].tobytes()
