"""torch's fused AdamW and SGD, without the import of the compiler; AdamW also with less Python each step."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch


# torch wraps methods of its optimizers for compiled callers, and these wrappers import the compiler: a second
# of CPU in each rank's start. Here the optimizer is never called from compiled code, so they are unwrapped.
class AdamW(torch.optim.AdamW):
    """torch's AdamW, without its wrappers for torch.compile, and with a direct call of the fused kernel.

    torch's step (creating state, sorting by device and dtype, a name for the profiler) is Python that takes
    longer than the kernel of a small model (docs/results/overhead.json), and grows with the parameters.
    """

    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    _step_by_torch = torch.optim.Optimizer.profile_hook_step(
        torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))
    )
    _alike = False

    def __init__(self, groups: list[dict[str, Any]], **settings: Any) -> None:
        """Takes torch's arguments; fused, without `amsgrad`, `maximize` and `differentiable`."""
        super().__init__(groups, **{"fused": True, **settings})
        kinds = [{(p.device, p.dtype) for p in group["params"]} for group in self.param_groups]
        self._alike = all(len(kind) == 1 for kind in kinds)

    @staticmethod
    def moments(_: torch.Tensor, __: Mapping[str, Any]) -> float:
        """See `PreallocatedOptimizer`."""
        return 2

    def step(self, closure: Any = None) -> Any:
        """Updates parameters that have a gradient; with hooks, a scaler or mixed dtypes by torch's step."""
        groups = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        states = [[self.state[p] for p in params] for _, params in groups]
        hooked = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        skips = getattr(self, "found_inf", None) is not None
        if closure is not None or hooked or skips or not self._alike or not all(map(all, states)):
            return self._step_by_torch(closure)
        with torch.no_grad():
            for (group, params), own in zip(groups, states, strict=True):
                _fused_adamw(group, params, own)
        return None

    step.hooked = True  # type: ignore[attr-defined]  # else torch wraps it for its hooks and profiler


def _fused_adamw(group: dict[str, Any], params: list[torch.Tensor], states: list[dict[str, Any]]) -> None:
    if not params:
        return
    steps = [state["step"] for state in states]
    torch._foreach_add_(steps, 1)
    torch._fused_adamw_(
        params,
        [p.grad for p in params if p.grad is not None],
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        steps,
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )


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
