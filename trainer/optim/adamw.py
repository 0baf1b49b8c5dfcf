"""torch's AdamW, without what costs a rank's start or each step."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch


# torch wraps methods of its optimizers for callers that are compiled, and these wrappers import the compiler:
# a second of CPU in each rank's start. Here the optimizer is never called from compiled code, so the methods
# come without; a torch that doesn't wrap them gives the same.
class AdamW(torch.optim.AdamW):
    """torch's, without what it does for torch.compile, and its fused kernel without the way there.

    That way (making state where there is none, sorting by device and dtype, a name for the profiler) is
    Python that takes longer than the kernel of a small model (docs/results/overhead.md), and grows with the
    parameters.
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
        """See `Kept`."""
        return 2

    def step(self, closure: Any = None) -> Any:
        """Updates the parameters that have a gradient; with anything out of the ordinary by torch's step."""
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

    step.hooked = True  # type: ignore[attr-defined]  # else torch puts its name and its hooks around it


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
