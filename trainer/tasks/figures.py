"""Results of a task's `measure`: sums, numbers or tensors (), and rows for each sample, tensors (n, …)."""

from typing import Any

import numpy as np
import torch

from trainer.observe.rows import why_no_metric


def as_tensor(value: Any) -> Any:
    """Converts a number to a float64 tensor (); returns any other value unchanged."""
    is_number = isinstance(value, int | float | np.integer | np.floating | np.bool_)
    return torch.as_tensor(value, dtype=torch.float64) if is_number else value


def why_unfit(name: object, value: Any, samples: int) -> str:
    """Returns the fault of a result measured on so many samples; "" if it has none."""
    has_rows = isinstance(value, torch.Tensor) and value.ndim > 0
    if why := why_no_name(name, has_rows):
        return f"{name!r:.80}, which {why}"
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return f"'{name}' as {describe_value(value)}"
    if not has_rows:
        return f"'{name}' as {describe_value(value)}" if value.is_complex() else ""
    return f"'{name}' as {describe_value(value)} for {samples} samples" if len(value) != samples else ""


def why_no_name(name: object, rows: bool) -> str:
    """Returns why a name can't be a figure's, or that of rows, which may have any text; "" if it can."""
    return "" if rows and isinstance(name, str) else why_no_metric(name)


def describe_value(value: Any) -> str:
    """Describes a value by its type, a tensor by layout, shape and dtype, for messages."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        layout = "" if value.layout is torch.strided else f"{str(value.layout).removeprefix('torch.')} "
        return f"a {layout}tensor of shape {tuple(value.shape)} and dtype {dtype}"
    return "nothing" if value is None else f"a {type(value).__name__}"
