"""Splits a state_dict of any object into tensors for safetensors and JSON, and joins them again."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


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
    if isinstance(plain, list):
        return [put_together(one, tensors) for one in plain]
    if not isinstance(plain, Mapping):
        return plain
    if len(plain) != 1:
        raise ValueError("unsupported type in the checkpoint's JSON")
    ((kind, value),) = plain.items()
    if kind == "tensor":
        return tensors[value].clone()
    if kind == "float":
        return float(value)
    values = [put_together(one, tensors) for one in value]
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
