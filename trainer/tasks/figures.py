"""Results that `measure` may return: sums, which are numbers or tensors (), and rows, tensors (n, …)."""

from typing import Any

import numpy as np
import torch

from trainer.observe.rows import why_no_metric


def as_tensor(value: Any) -> Any:
    """A number as a tensor; anything else as it is."""
    plain = isinstance(value, int | float | np.integer | np.floating | np.bool_)
    return torch.as_tensor(value, dtype=torch.float64) if plain else value


def why_unfit(name: object, value: Any, samples: int) -> str:
    """Says what is wrong with a figure measured on so many samples; empty if nothing is."""
    rows = isinstance(value, torch.Tensor) and value.ndim > 0
    if why := "" if rows and isinstance(name, str) else why_no_metric(name):
        return f"{name!r:.80}, which {why}"
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return f"'{name}' as {told(value)}"
    if not rows and value.is_complex():
        return f"'{name}' as {told(value)}"
    return f"'{name}' as {told(value)} for {samples} samples" if rows and len(value) != samples else ""


def told(value: Any) -> str:
    """Describes a value in a few words."""
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        layout = "" if value.layout is torch.strided else f"{str(value.layout).removeprefix('torch.')} "
        return f"a {layout}tensor of shape {tuple(value.shape)} and dtype {kind}"
    return "nothing" if value is None else f"a {type(value).__name__}"
