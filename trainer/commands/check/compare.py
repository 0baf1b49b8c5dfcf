"""Finds the first difference between two trainings that is larger than rounding explains."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trainer.commands.check.plain import StepTensors

_ULPS = 256  # of a tensor's largest value: sums of other order in the few steps that are compared
_SPREADS = 32  # times what the plain loop itself differs by if it is rounded otherwise
_NOISE, _WEAK = 0.01, 1e-4
# Adam's first update is the gradient's sign times the rate, and where numbers are short rounding turns some.
_FLIPS, _PRECISE = 0.02, 1e-12


@dataclass(frozen=True)
class Difference:
    """A tensor that differs.

    Attributes:
        tensor: Its name: loss, lr, model/NAME, optimizer/NAME/SLOT, ema/NAME, metric/NAME.
        step: The step after which it was seen, from 1.
        what: The difference, in a few words.
    """

    tensor: str
    step: int
    what: str

    def __str__(self) -> str:
        """The difference as a sentence."""
        return f"{self.tensor} after step {self.step}: {self.what}"


@dataclass(frozen=True)
class Compared:
    """Result of a comparison of two trainings.

    Attributes:
        first: The first difference, or None.
        largest: The largest relative difference of a tensor (to its largest value); without `noise`.
        bound: The largest bound, relative in the same way.
        noise: Tensors that can't be compared: rounding alone moves them by more than 1 %.
    """

    first: Difference | None
    largest: float
    bound: float
    noise: tuple[str, ...] = ()

    def and_then(self, other: "Compared") -> "Compared":
        """Returns the result of both comparisons."""
        both = max(self.largest, other.largest), max(self.bound, other.bound)
        return Compared(self.first or other.first, *both, self.noise + other.noise)

    def __str__(self) -> str:
        """The bound to which the trainings are equal, as a sentence."""
        if not self.largest:
            return "every bit"
        weak = ", which is weak" if self.bound > _WEAK else ""
        apart = f"to {self.largest:.0e} of the largest value (bound {self.bound:.0e}{weak})"
        return (
            f"{apart}, but {len(self.noise)} that are rounding alone: {self.noise[0]}"
            if self.noise
            else apart
        )


def compare(
    found: Sequence[StepTensors],
    wanted: Sequence[StepTensors],
    nudged: Sequence[StepTensors] | None = None,
    eps: float = 0.0,
    begin: int = 0,
    moved: Collection[str] = (),
) -> Compared:
    """Compares step by step: loss and rate, then weights and buffers, moments, average, metrics.

    A tensor's bound comes from the plain loop alone: 32 times its difference from a run with other rounding
    (`nudged`), and at least 256 units in the last place of its largest value. Below float64, 2 % of a
    tensor's elements (at least one, if it has several) may exceed the bound.

    Args:
        nudged: The run with other rounding; None: the bits must be the same.
        eps: Machine epsilon of the precision in which both compute.
        begin: Number of first steps that aren't compared.
        moved: Names of tensors that a forward pass may change (buffers, frozen parameters): where such a
            tensor and the loss differ after the same step, the tensor is named, as the loss depends on it.
    """
    largest = loosest = 0.0
    noise = dict[str, None]()
    for step in range(begin, len(wanted)):
        ours, theirs = found[step] if step < len(found) else {}, wanted[step]
        # What an optimizer keeps is zeros before the first update, or isn't there yet.
        odd = [Difference(n, step + 1, "is missing") for n in theirs if n not in ours and theirs[n].any()]
        odd += [Difference(n, step + 1, "is one too many") for n in ours if n not in theirs and ours[n].any()]
        for name, tensor in theirs.items():
            if name not in ours:
                continue
            one, other = as_float64(ours[name]), as_float64(tensor)
            if one.shape != other.shape:
                odd.append(Difference(name, step + 1, f"shape {one.shape} instead of {other.shape}"))
                continue
            if np.array_equal(one, other, equal_nan=True):
                continue
            scale, bound = float(np.abs(other).max(initial=0.0)), 0.0
            if nudged is not None:
                bound = _SPREADS * float(np.abs(as_float64(nudged[step][name]) - other).max(initial=0.0))
                if tensor.is_floating_point() or tensor.is_complex():
                    bound = max(bound, _ULPS * eps * scale)
            apart = np.abs(one - other)
            flips = math.ceil(_FLIPS * apart.size) if eps > _PRECISE else 0
            worst = int(
                np.argsort(np.where(np.isnan(apart), np.inf, apart), axis=None)[-1 - flips * (apart.size > 1)]
            )
            by = float(apart.flat[worst])
            if not by <= bound:
                values = f"{one.flat[worst]:.9g} instead of {other.flat[worst]:.9g}"
                odd.append(Difference(name, step + 1, values + f" (bound {bound:.0e})" * (bound > 0)))
            elif bound > _NOISE * scale:
                noise[name] = None
            else:
                largest, loosest = max(largest, by / scale), max(loosest, bound / scale)
        if odd:
            first = next((one for one in odd if one.tensor in moved), odd[0])
            return Compared(first, largest, loosest, tuple(noise))
    return Compared(None, largest, loosest, tuple(noise))


def as_float64(tensor: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Converts to a float64 array, which holds all narrower floats exactly."""
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return plain.detach().double().numpy()
