"""Error of an exported model's outputs against the model's own."""

import math
from collections.abc import Sequence

import torch

ModelOutputs = Sequence[torch.Tensor]

LIMITS = {"fp32": 1e-4, "bf16": 2e-2}


def relative_error(wanted: ModelOutputs, given: ModelOutputs) -> float:
    """Returns the largest absolute difference over the largest absolute value, for the worst output.

    Args:
        wanted: ModelOutputs of the trained model.
        given: ModelOutputs of the exported file.

    Returns:
        Infinity if they can't be compared: different shapes, a NaN in either, or no output.
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
