"""Finds the module that first produced a NaN or an infinity (`precision.debug`).

Each module's inputs, output and the gradient of its output are looked at on the device. Where nothing
was wrong before, the first that is wrong tells where to look; it is read late, with the other figures.
"""

import functools
from typing import Any

import torch
from torch import distributed as dist, nn

from trainer.observe.console import warn
from trainer.observe.log import Row


class FirstNonFinite:
    """Flags on the device, one for each place that is looked at, in the order of their first use."""

    def __init__(self, model: nn.Module, device: torch.device, group: dist.ProcessGroup | None) -> None:
        """Watches every module of a model."""
        modules = list(model.named_modules())
        self._group = group
        self._places: dict[str, int] = {}
        # Three for each module, and one that stands for none.
        self._flags = torch.zeros(3 * len(modules) + 1, dtype=torch.bool, device=device)
        for name, module in modules:
            label = name or "the model"
            module.register_forward_pre_hook(functools.partial(self._before, f"input of {label}"))
            module.register_forward_hook(functools.partial(self._after, label))

    def take(self) -> torch.Tensor:
        """Number of the first place, -1 for none: float64 (), over all ranks, since the last call."""
        self._flags[-1] = True
        first = self._flags.to(torch.uint8).argmax()
        if self._group is not None:
            dist.all_reduce(first, op=dist.ReduceOp.MIN, group=self._group)
        none = first == len(self._flags) - 1
        self._flags.zero_()
        return torch.where(none, -1, first).to(torch.float64)

    def explain(self, row: Row) -> None:
        """A sink: names the place on standard error, if the windows of the row had one."""
        number = int(row.get("first_nonfinite", -1))
        if number >= 0:
            place = next(name for name, place in self._places.items() if place == number)
            warn(f"window {row['window']}: since the last row, the first that wasn't finite was the {place}")

    def _before(self, place: str, module: nn.Module, inputs: Any) -> None:
        for value in inputs if module.training else ():
            self._look(place, value)

    def _after(self, label: str, module: nn.Module, _inputs: Any, output: Any) -> None:
        if not module.training:
            return
        self._look(f"output of {label}", output)
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(functools.partial(self._look, f"gradient of the output of {label}"))

    def _look(self, place: str, value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            number = self._places.setdefault(place, len(self._places))
            self._flags[number] |= ~value.detach().isfinite().all()
