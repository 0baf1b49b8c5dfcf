"""Read-only memory that loader workers share with their parent process, for all start methods."""

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
    """Returns the descriptor of an empty unnamed file, in memory where the system supports it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("trainer")
    with tempfile.TemporaryFile() as file:  # macOS: deleted already
        return os.dup(file.fileno())


class Columns:
    """Named arrays in one read-only mapping of a safetensors file.

    A list of a million Python objects is copied into every loader worker as reference counts are touched
    (pytorch#13246), and pickled for each that isn't forked. The mapping exists once per machine.
    """

    def __init__(self, file: int) -> None:
        """Maps a file; its descriptor is closed when the object is freed.

        Raises:
            ValueError: If the file isn't safetensors.
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
        """Copies the content of a safetensors file: mapping the file itself risks SIGBUS if it is truncated.

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
        """Returns copies of some samples' rows, in this order, including their names."""
        arrays = {name: array[samples] for name, array in self._arrays.items() if name != "name"}
        if "name" in self:
            arrays |= name_columns([name_at(self, sample) for sample in samples.tolist()])
        return arrays

    def replaced(self, name: str, array: npt.NDArray[Any]) -> "Columns":
        """Returns a copy with another array of this name."""
        return Columns.hold({**{each: old.copy() for each, old in self._arrays.items()}, name: array})

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """Returns a read-only array."""
        return self._arrays[name]

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def __getstate__(self) -> Any:
        """Pickles the file descriptor instead of the bytes, for workers that aren't forked."""
        return reduction.DupFd(self._file)

    def __setstate__(self, state: Any) -> None:
        """Maps the same memory in a loader worker."""
        self.__init__(state.detach())  # type: ignore[misc]

    def __del__(self) -> None:
        file, self._file = getattr(self, "_file", -1), -1
        if file >= 0:
            os.close(file)


def name_columns(names: list[bytes]) -> dict[str, npt.NDArray[Any]]:
    """Packs byte strings into two columns: "name", uint8 (all bytes,), and "name_end", int64 (n,)."""
    ends = np.cumsum([len(name) for name in names], dtype=np.int64)
    return {"name": np.frombuffer(bytearray().join(names), np.uint8), "name_end": ends}


def names_in(columns: Columns | Mapping[str, npt.NDArray[Any]]) -> list[bytes]:
    """Returns all byte strings that `name_columns` packed."""
    text, ends = columns["name"].tobytes(), columns["name_end"].tolist()
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def name_at(columns: Columns, index: int) -> bytes:
    """Returns one of the byte strings that `name_columns` packed."""
    ends = columns["name_end"]
    start = int(ends[index - 1]) if index else 0
    return columns["name"][start : int(ends[index])].tobytes()
