"""Safetensors format: a streaming writer for tensors of any layout, and a strict reader.

The library's own writer rejects channels_last and tied tensors, and returns before the data is on the disk.
The state_dict of any object is parted into tensors, for such a file, and JSON.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from trainer.host import strict_json

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_DIMENSIONS = 64  # torch's limit for iterating over elements


class Slot(NamedTuple):
    """Position of a tensor in a file: bytes from `start` to `stop`, counted from the end of the header."""

    name: str
    dtype: torch.dtype
    shape: list[int]
    start: int
    stop: int


def is_storable(tensor: torch.Tensor) -> bool:
    """True if the format supports the tensor's dtype and layout."""
    return tensor.dtype in _NAMES and tensor.layout is torch.strided


def safetensors_bytes(
    tensors: Mapping[str, torch.Tensor], about: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yields the bytes of a safetensors file: the header, then each tensor made contiguous.

    Args:
        tensors: Tensors by name. Tied ones are written once for each name. Lazy ones, which are read when
            they are sliced, are freed before the next one is read.
        about: The file's metadata.

    Raises:
        ValueError: At the call, for a dtype or a name that the format doesn't support.
    """
    # Largest dtypes first, as the library does, so that each tensor is aligned to its item size.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    entries: dict[str, Any] = {"__metadata__": dict(about)} if about else {}
    end = 0
    for name in order:
        tensor = tensors[name]
        if not is_storable(tensor) or name == "__metadata__":
            raise ValueError(f"'{name}' ({tensor.dtype}, {tensor.layout}) can't be saved as safetensors")
        start, end = end, end + tensor.numel() * tensor.dtype.itemsize
        shape = list(tensor.shape)
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > strict_json.LARGEST:
        raise ValueError(f"the names and shapes take more than {strict_json.LARGEST >> 20} MiB")
    return chain([len(header).to_bytes(8, "little") + header], (_bytes(tensors[name][...]) for name in order))


def _bytes(tensor: torch.Tensor) -> memoryview:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return bytes_view(plain.reshape(-1).view(torch.uint8))


def bytes_view(data: torch.Tensor) -> memoryview:
    """Returns the memory of a uint8 vector on the CPU."""
    view: memoryview = data.numpy().data
    return view


def header_size(first: bytes, file_size: int) -> int:
    """Returns the size of a file's header in bytes, from the first eight bytes.

    Raises:
        ValueError: If the file isn't safetensors.
    """
    size = int.from_bytes(first, "little")
    if len(first) < 8 or size > min(strict_json.LARGEST, file_size - 8):
        raise ValueError("isn't a safetensors file (no header of a sane size)")
    return size


def parse_header(header: bytes, data_size: int) -> list[Slot]:
    """Parses a file's header into slots.

    Args:
        header: The header without the eight bytes before it.
        data_size: Bytes of the file after the header.

    Raises:
        ValueError: If it is malformed, or the tensors don't fill the data without gap or overlap.
    """
    try:
        entries = strict_json.parse(header)
    except ValueError as error:
        raise ValueError(f"its header: {error}") from error
    if not isinstance(entries, dict):
        raise ValueError("its header isn't a mapping")
    entries.pop("__metadata__", None)
    slots = sorted((_slot(name, entry) for name, entry in entries.items()), key=lambda slot: slot[3:])
    end = 0
    for slot in slots:
        if slot.start != end:
            raise ValueError("its tensors overlap or leave a gap")
        if (8 + len(header) + slot.start) % slot.dtype.itemsize:
            raise ValueError("a tensor isn't aligned to its numbers")
        end = slot.stop
    if end != data_size:
        raise ValueError(f"holds {data_size:,} bytes of tensors, its header says {end:,}")
    return slots


def _slot(name: str, entry: Any) -> Slot:
    def sizes(value: Any, most: int) -> bool:
        return (
            isinstance(value, list)
            and len(value) <= most
            and all(type(number) is int and 0 <= number < 1 << 63 for number in value)
        )

    if not (
        isinstance(entry, dict)
        and set(entry) == {"dtype", "shape", "data_offsets"}
        and isinstance(entry["dtype"], str)
        and entry["dtype"] in _DTYPES
        and sizes(entry["shape"], _DIMENSIONS)
        and sizes(entry["data_offsets"], 2)
        and len(entry["data_offsets"]) == 2
    ):
        raise ValueError("its header describes a tensor in a way that isn't known")
    dtype, shape, (start, stop) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    # torch computes strides for an empty tensor, too.
    largest = math.prod(max(size, 1) for size in shape) * dtype.itemsize
    if stop - start != math.prod(shape) * dtype.itemsize or largest >= 1 << 63:
        raise ValueError("a tensor's shape and size differ")
    return Slot(name, dtype, shape, start, stop)


def tensors_in(data: torch.Tensor, slots: list[Slot]) -> dict[str, torch.Tensor]:
    """Returns the tensors of a file by name, as views of its bytes."""
    return {slot.name: data[slot.start : slot.stop].view(slot.dtype).view(slot.shape) for slot in slots}


def take_apart(state: Any, name: str) -> tuple[dict[str, torch.Tensor], Any]:
    """Splits a state into its tensors by name, uncopied, and the rest for JSON with references to them.

    Args:
        state: Nested dicts, lists and tuples of tensors, numbers, strings and None.
        name: Prefix of the tensors' names.

    Raises:
        ValueError: If it holds another type; the message has its path.
    """
    tensors: dict[str, torch.Tensor] = {}
    return tensors, _plain(state, name, tensors)


def put_together(plain: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Restores a state from its parts, with copies of the tensors.

    Raises:
        KeyError: If a tensor is missing.
        ValueError: If it isn't a result of `take_apart`.
    """
    try:
        return _whole(plain, tensors)
    except (TypeError, RecursionError) as error:
        raise ValueError("unsupported type in the checkpoint's JSON") from error


def _whole(plain: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(plain, list):
        return [_whole(one, tensors) for one in plain]
    if not isinstance(plain, Mapping):
        return plain
    if len(plain) != 1:
        raise ValueError("unsupported type in the checkpoint's JSON")
    ((kind, value),) = plain.items()
    if kind == "tensor":
        return tensors[value].clone()
    if kind == "float":
        return float(value)
    values = [_whole(one, tensors) for one in value]
    if kind == "tuple":
        return tuple(values)
    if kind not in ("dict", "Counter"):
        raise ValueError(f"unsupported type in the checkpoint's JSON ({kind})")
    pairs = dict(map(tuple, values))
    return pairs if kind == "dict" else Counter(pairs)


def _plain(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, torch.Tensor):
        if path in tensors:
            raise ValueError(f"{path}: there are two of that name")
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}  # JSON has no such number
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        pairs = [
            [_plain(key, f"{path}/key", tensors), _plain(one, f"{path}/{key}", tensors)]
            for key, one in value.items()
        ]
        return {"Counter" if isinstance(value, Counter) else "dict": pairs}
    if isinstance(value, list | tuple):
        values = [_plain(one, f"{path}/{number}", tensors) for number, one in enumerate(value)]
        return values if isinstance(value, list) else {"tuple": values}
    raise ValueError(f"{path} is a {type(value).__name__}")
