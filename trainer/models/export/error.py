"""Error of an exported model's outputs against those of the model."""

import math
from collections.abc import Sequence

import torch

Outputs = Sequence[torch.Tensor]

LIMITS = {"fp32": 1e-4, "bf16": 2e-2}


def relative_error(wanted: Outputs, given: Outputs) -> float:
    """The largest difference over the largest value wanted, of the worst output.

    Args:
        wanted: What the trained model gives.
        given: What the file gives.

    Returns:
        Infinity if the two can't be compared: other shapes, a NaN on either side, or nothing at all.
    """
    if [one.shape for one in wanted] != [one.shape for one in given]:
        return math.inf
    pairs = zip(wanted, given, strict=True)
    return max((_error(one.double(), other.double()) for one, other in pairs), default=math.inf)


def _error(wanted: torch.Tensor, given: torch.Tensor) -> float:
    if torch.equal(wanted, given):
        return 0.0
    difference, largest = float((wanted - given).abs().max()), float(wanted.abs().max())
    return difference / largest if difference < math.inf and 0 < largest < math.inf else math.inf
