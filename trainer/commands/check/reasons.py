"""Why several micro-batches in a step give something else than one, in plain PyTorch too: found by trying."""

from collections.abc import Callable, Collection, Sequence
from itertools import combinations
from types import MappingProxyType

from trainer.commands.check.plain import Cause

REASONS = MappingProxyType(
    {
        "batchnorm": "BatchNorm sees one micro-batch at a time",
        "random": "random numbers are drawn for each micro-batch",
        "state": "a forward pass changes buffers or frozen parameters, and each micro-batch of a step begins "
        "with the same ones",
    }
)
_OTHER = "the loss compares the samples of a micro-batch, or is a mean that can't be divided"


def reason(causes: Sequence[Cause], alike: Callable[[Collection[Cause]], bool | None]) -> str:
    """Names the causes of a difference: without them, one micro-batch and several give the same.

    Args:
        causes: Causes that the task has.
        alike: Trains with these causes kept from working; True if the difference is gone, None if that
            can't be tried.
    """
    unknown = False
    for count in range(1, len(causes) + 1):
        for some in combinations(causes, count):
            gone = alike(some)
            unknown = unknown or gone is None
            if gone:
                return f"{' and '.join(REASONS[one] for one in some)} (without {_it(some)} both are equal)"
    if unknown:
        return f"may be: {'; '.join([*(REASONS[one] for one in causes), _OTHER])} (couldn't be tried)"
    return f"{_OTHER} (both differ without anything else that was tried, too)" if causes else _OTHER


def _it(some: Sequence[Cause]) -> str:
    return "that" if len(some) == 1 else "these"
