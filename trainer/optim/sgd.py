"""torch's SGD, without the import of the compiler, see `adamw`."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch


class SGD(torch.optim.SGD):
    """torch's SGD, without its wrappers for torch.compile."""

    add_param_group = inspect.unwrap(torch.optim.SGD.add_param_group)
    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: torch.Tensor | float,
        momentum: float,
        nesterov: bool = True,
    ) -> None:
        """Uses the fused kernel; with a momentum its state is created at once."""
        super().__init__(groups, lr=lr, momentum=momentum, nesterov=nesterov and momentum > 0, fused=True)
        # torch's fused SGD leaves these uninitialized if the scaler skips the first update, as it usually
        # does, and then adds uninitialized memory to the weights (seen in 2.9.1).
        for parameter in (p for group in self.param_groups for p in group["params"] if momentum):
            self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    @staticmethod
    def moments(_: torch.Tensor, group: Mapping[str, Any]) -> float:
        """See `PreallocatedOptimizer`."""
        return 1 if group["momentum"] else 0
