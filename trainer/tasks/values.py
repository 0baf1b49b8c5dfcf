"""Results of `loss` and `measure`: values for each sample and what of them counts; their faults in words.

Those of a built-in task's `measure` are sums, numbers or tensors (), or rows for each sample, tensors (n, …).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from trainer.observe.rows import why_no_metric

NARROW = 4  # bytes of a float: a sum is made in no less
OLD_SUM = (
    'give a value for each sample, (n,), as F.cross_entropy(…, reduction="none") does: the trainer takes the '
    "mean. (What is one mean of the micro-batch, such as the .loss of a transformers model: reduction = "
    '"mean" in the class)'
)


class Values(NamedTuple):
    """Values of a micro-batch.

    Attributes:
        values: (n,), or (n, …) with counts or as rows; (): a mean over the micro-batch's items.
        counts: Which of them count, or their weights, of the same shape; None: each counts once.
    """

    values: torch.Tensor
    counts: torch.Tensor | None = None

    def total(self) -> torch.Tensor:
        """Returns the sum of what counts, (), in float32 at least; of bools and whole numbers in float64."""
        values, counts = self.values, self.counts
        if not values.is_floating_point():
            values = values.double()
        elif values.element_size() < NARROW:
            values = values.float()
        if counts is None:
            return values.sum()
        counted = torch.where(counts != 0, values, 0)  # a NaN that doesn't count is none of the sum's
        return (counted if counts.dtype == torch.bool else counted * counts).sum()

    def number(self) -> torch.Tensor:
        """Returns the sum of the counts, float64 ()."""
        assert self.counts is not None
        return self.counts.sum(dtype=torch.float64)

    def rows(self, added: int = 0) -> Any:
        """Returns the values, or the pair of values and counts, with so many zeros behind them."""
        one, *counts = (
            torch.cat([part, part.new_zeros((added, *part.shape[1:]))]) if added else part
            for part in self
            if part is not None
        )
        return (one, *counts) if counts else one


def read_values(given: Any, samples: int, mean: bool, rows: bool = False) -> Values:
    """Reads a result of a method on so many samples.

    Args:
        given: Values, or a pair of values and counts.
        samples: Samples of the micro-batch.
        mean: Whether a mean, (), is one.
        rows: Whether values without counts may have more dimensions.

    Raises:
        ValueError: If it is none of these; says what it is, and what it may be.
    """
    values, counts = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    if isinstance(values, int | float | np.generic):
        values = torch.as_tensor(float(values), dtype=torch.float64)
    fit = isinstance(values, torch.Tensor) and values.layout is torch.strided
    if not fit or (values.is_complex() and not rows):
        raise ValueError(f"{describe_value(values)}; give a tensor of numbers, (n,)")
    what = describe_value(values)
    if not values.ndim:
        if mean and counts is None:
            return Values(values)
        raise ValueError(f"{what}; {OLD_SUM}")
    if len(values) != samples:
        raise ValueError(f"{what} for {samples} samples; give a value for each of them, ({samples},)")
    if counts is not None:
        fit = isinstance(counts, torch.Tensor) and counts.shape == values.shape and not counts.is_complex()
        if not fit or not (counts.dtype.is_signed or counts.element_size() == 1):  # torch can't add uint16
            raise ValueError(
                f"{what} with {describe_value(counts)} as counts; give a mask or weights of its shape, (n, …)"
            )
        return Values(values, counts)
    if values.ndim == 1 or rows:
        return Values(values)
    if values[0].numel() == 1:
        return Values(values.reshape(samples))
    slip = ", which looks like each sample with each: (n, 1) minus (n,)" * (
        values.shape == (samples, samples)
    )
    axes = 1 if values.ndim == 2 else tuple(range(1, values.ndim))
    raise ValueError(
        f"{what}{slip}; add .sum({axes}) or .mean({axes}), whose gradients differ in size, or give the pair "
        "(values, counts), of which counts says what counts: a mask, or weights"
    )


def means(values: Mapping[str, Any], *names: str) -> dict[str, float]:
    """Returns the means of some of the values that `summarize` gets, by name, each over what counts.

    Args:
        values: What `summarize` got: a tensor (samples, …) by name, or a pair (values, counts).
        names: Names of the figures; all of them if none is given.

    Returns:
        A number for each name; NaN where nothing counts.
    """
    found = {}
    for name in names or values:
        one = values[name]
        pair = Values(*one) if isinstance(one, tuple) else Values(one.double(), torch.ones_like(one))
        found[name] = float(Values(pair.values.double(), pair.counts).total() / pair.number())
    return found


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


def bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Returns the bytes of a tensor of any layout, uint8 (n,), a copy."""
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    plain = dense.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    # A copy: numpy() would fix the size of the user's tensor for good, and a forward pass may resize it.
    return plain.clone().view(torch.uint8).numpy()


def describe_value(value: Any) -> str:
    """Describes a value by its type, a tensor by layout, shape and dtype, for messages."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        layout = "" if value.layout is torch.strided else f"{str(value.layout).removeprefix('torch.')} "
        return f"a {layout}tensor of shape {tuple(value.shape)} and dtype {dtype}"
    return "nothing" if value is None else f"a {type(value).__name__}"
