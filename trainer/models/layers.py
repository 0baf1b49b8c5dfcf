"""What flows through each part of a model, now and then (`log.layers_every`): activations and gradients.

Of a step of which it is asked: the outputs of each part in all micro-batches of this rank, and the gradients
of its parameters as the update gets them: of all ranks, unscaled, before clipping. All of it is computed on
the device and read late; nothing that is trained is touched.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from trainer.models.parts import called, parameters_of, parts

MOST = 64  # parts
# Of a part, on the device: what is summed over the outputs, their largest; the same of the gradients.
_SQUARES, _ZEROS, _ODD, _LARGEST, _GRADIENT_SQUARES, _GRADIENT_ODD, _GRADIENT_LARGEST = range(7)


class Flow(NamedTuple):
    """The statistics of a step, on the device, and what turns them into the metrics of a row.

    Attributes:
        values: float64 (parts x 7,).
        names: Of the parts.
        outputs: How many numbers each part gave.
        gradients: How many numbers the gradients of each part are.
    """

    values: torch.Tensor
    names: tuple[str, ...]
    outputs: tuple[int, ...]
    gradients: tuple[int, ...]

    def metrics(self, values: Sequence[float]) -> dict[str, float]:
        """By name: `act_rms/PART`, `act_max`, `act_zeros`, `act_nonfinite`; `grad_rms`, `_max`, `_nonfinite`.

        Args:
            values: `self.values`, once they are on the host.
        """
        found = dict[str, float]()
        for number, name in enumerate(self.names):
            one = values[7 * number : 7 * number + 7]
            if count := self.outputs[number]:
                found[f"act_rms/{name}"] = math.sqrt(one[_SQUARES] / count)
                found[f"act_max/{name}"] = one[_LARGEST]
                found[f"act_zeros/{name}"] = one[_ZEROS] / count
                found[f"act_nonfinite/{name}"] = one[_ODD] / count
            if count := self.gradients[number]:
                found[f"grad_rms/{name}"] = math.sqrt(one[_GRADIENT_SQUARES] / count)
                found[f"grad_max/{name}"] = one[_GRADIENT_LARGEST]
                found[f"grad_nonfinite/{name}"] = one[_GRADIENT_ODD] / count
        return found


class LayerStatistics:
    """Looks at the parts of a model in every so manyth step."""

    def __init__(self, model: nn.Module, every: int, device: torch.device) -> None:
        """Watches a model, which isn't compiled as a whole; blocks of it may be."""
        shown = parts(model, MOST)
        held = parameters_of(model, shown)
        self._every, self._device, self._on = every, device, False
        self._names = tuple(part.name or "besides" for part in shown)
        self._parameters = [held[part.name] for part in shown]
        self._flow: Flow | None = None
        self._begin()
        for number, part in enumerate(shown):
            for module in called(model, part):
                module.register_forward_hook(functools.partial(self._after, number))

    def begin_step(self, step: int) -> None:
        """Looks at this step, the first one being 0, if it is one of those that are asked for."""
        self._on = (step + 1) % self._every == 0
        if self._on:
            self._begin()

    def _begin(self) -> None:
        self._table = torch.zeros(len(self._names), 7, dtype=torch.float64, device=self._device)
        self._outputs = [0] * len(self._names)

    def end_step(self) -> None:
        """Looks at the gradients, before they are clipped."""
        if not self._on:
            return
        self._on = False
        counts = []
        for row, parameters in zip(self._table.unbind(), self._parameters, strict=True):
            gradients = [p.grad for p in parameters if p.grad is not None]
            counts.append(sum(gradient.numel() for gradient in gradients))
            for gradient in gradients:
                _add(gradient, row[_GRADIENT_SQUARES], row[_GRADIENT_LARGEST], row[_GRADIENT_ODD])
        self._flow = Flow(self._table.view(-1), self._names, tuple(self._outputs), tuple(counts))

    def take(self) -> Flow | None:
        """The statistics of the last step, once, if it was looked at."""
        flow, self._flow = self._flow, None
        return flow

    def _after(self, number: int, _module: nn.Module, _inputs: Any, output: Any) -> None:
        # A model's own torch.compile is to make the code that it makes without us.
        if not self._on or torch.compiler.is_compiling():
            return
        row = self._table[number]
        with torch.no_grad():
            for value in tree_leaves(output):
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    self._outputs[number] += value.numel()
                    row[_ZEROS] += (value == 0).sum()
                    _add(value.detach(), row[_SQUARES], row[_LARGEST], row[_ODD])


def _add(values: torch.Tensor, squares: torch.Tensor, largest: torch.Tensor, odd: torch.Tensor) -> None:
    """Adds numbers to a sum of squares, their largest magnitude, and how many of them aren't finite."""
    if not values.numel():
        return
    wide = torch.promote_types(values.dtype, torch.float32)
    squares += torch.linalg.vector_norm(values, dtype=wide).double().square()
    torch.maximum(largest, torch.linalg.vector_norm(values, math.inf, dtype=wide).double(), out=largest)
    odd += values.numel() - values.isfinite().sum()
