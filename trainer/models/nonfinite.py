"""Finds the module that first produced a NaN or an infinity (`precision.debug`).

Each module's weights, inputs, output and the gradient of its output are checked on the device. The first
one that isn't finite is read late, with the other metrics.
"""

import functools
from typing import Any

import torch
from torch import distributed as dist, nn

from trainer.observe.console import warn
from trainer.observe.log import Row

_NONE = (1 << 63) - 1


class FirstNonFinite:
    """Flags on the device, one for each checked tensor, in the order of their first use."""

    def __init__(self, model: nn.Module, device: torch.device, group: dist.ProcessGroup | None) -> None:
        """Registers hooks on every module of a model."""
        modules = list(model.named_modules())
        self._group = group
        self._numbers: dict[str, int] = {}
        # Four for each module, and the last one for none.
        self._flags = torch.zeros(4 * len(modules) + 1, dtype=torch.bool, device=device)
        self._first = torch.full((), _NONE, device=device)
        for name, module in modules:
            label = name or "the model"
            module.register_forward_pre_hook(functools.partial(self._before, label))
            module.register_forward_hook(functools.partial(self._after, label))

    def end_step(self, step: int) -> None:
        """Records the step's first nonfinite tensor, unless an earlier step had one."""
        self._flags[-1:].fill_(True)  # assignment to an element would copy from the host and synchronize
        number = self._flags.to(torch.uint8).argmax()
        found = torch.where(number < len(self._flags) - 1, number + step * len(self._flags), _NONE)
        self._first = torch.minimum(self._first, found)
        self._flags.zero_()

    def take(self) -> dict[str, torch.Tensor]:
        """Returns step and number of the first one over all ranks since the last call, each (); -1: none."""
        first, self._first = self._first, torch.full_like(self._first, _NONE)
        if self._group is not None:
            dist.all_reduce(first, op=dist.ReduceOp.MIN, group=self._group)
        none = first == _NONE
        step, number = first // len(self._flags), first % len(self._flags)
        return {
            "nonfinite_step": torch.where(none, -1, step),
            "nonfinite_place": torch.where(none, -1, number),
        }

    def name_first(self, row: Row) -> None:
        """Warns of the first nonfinite tensor in a metrics record's steps; a sink."""
        number = int(row.get("nonfinite_place", -1))
        if number >= 0:
            tensor = next(name for name, one in self._numbers.items() if one == number)
            step = int(row["nonfinite_step"]) + 1
            warn(f"step {step}: the first that wasn't finite was the {tensor}")

    def _before(self, label: str, module: nn.Module, inputs: Any) -> None:
        if not _is_trained(module):
            return
        for weights in module.parameters(recurse=False):
            self._look(f"weights of {label}", weights)
        for value in inputs:
            self._look(f"input of {label}", value)

    def _after(self, label: str, module: nn.Module, _inputs: Any, output: Any) -> None:
        if not _is_trained(module):
            return
        self._look(f"output of {label}", output)
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(functools.partial(self._look, f"gradient of the output of {label}"))

    def _look(self, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            number = self._numbers.setdefault(name, len(self._numbers))
            self._flags[number] |= ~value.detach().isfinite().all()


def _is_trained(module: nn.Module) -> bool:
    """True in a forward pass of the training, where single modules may be in evaluation mode."""
    # The model's own torch.compile must not trace these hooks.
    return (module.training or torch.is_grad_enabled()) and not torch.compiler.is_compiling()
