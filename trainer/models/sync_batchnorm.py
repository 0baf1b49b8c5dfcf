"""BatchNorm with statistics over the micro-batches of all ranks.

torch.nn.SyncBatchNorm runs on a GPU only; this one runs with any process group, and is tested with real
processes. Statistics are combined as in Chan et al., 1979.
"""

from typing import Any

import torch
from torch import distributed as dist, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.models.finetune import keeps_statistics
from trainer.observe.phases import Phase, communicating, enter_phase


def synchronize_batchnorm(model: nn.Module, group: dist.ProcessGroup) -> int:
    """Makes every BatchNorm layer a synchronized one, in place; names stay.

    Returns:
        Number of layers.
    """
    layers = [m for m in model.modules() if isinstance(m, _BatchNorm) and not keeps_statistics(m)]
    for layer in layers:
        layer.forward = _Synchronized(layer, group)  # type: ignore[method-assign, assignment]
    return len(layers)


class _Synchronized:
    def __init__(self, layer: _BatchNorm, group: dist.ProcessGroup) -> None:
        self._layer = layer
        self._group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Synchronized":
        # For a trial on a copy of the model: a process group can't be copied.
        return _Synchronized(memo[id(self._layer)], self._group)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        layer = self._layer
        if not layer.training:
            return type(layer).forward(layer, x)
        with torch.autocast(x.device.type, enabled=False):
            return self._normalized(layer, x.float() if x.dtype in _LOW else x).to(x.dtype)

    def _normalized(self, layer: _BatchNorm, x: torch.Tensor) -> torch.Tensor:
        world = dist.get_world_size(self._group)
        over = [dim for dim in range(x.ndim) if dim != 1]
        count = x.numel() // x.shape[1]
        var, mean = torch.var_mean(x, over, correction=0)
        means, variances = _GatherOverRanks.apply(  # type: ignore[no-untyped-call]
            torch.stack((mean, var)), self._group
        ).unbind(1)
        mean = means.mean(0)
        var = variances.mean(0) + (means - mean).square().mean(0)
        if layer.track_running_stats and layer.running_mean is not None and layer.running_var is not None:
            # For momentum=None `batchnorm` computes the mean of all calls.
            momentum = 0.1 if layer.momentum is None else layer.momentum
            unbiased = var.detach() * (world * count / max(1, world * count - 1))
            layer.running_mean.lerp_(mean.detach().to(layer.running_mean.dtype), momentum)
            layer.running_var.lerp_(unbiased.to(layer.running_var.dtype), momentum)
            if layer.num_batches_tracked is not None:
                layer.num_batches_tracked.add_(1)
        scale = (var + layer.eps).rsqrt()
        shift = -mean * scale
        if layer.affine:
            scale, shift = scale * layer.weight, shift * layer.weight + layer.bias
        shape = [1, -1, *[1] * (x.ndim - 2)]
        return torch.addcmul(shift.view(shape), x, scale.view(shape))


_LOW = (torch.float16, torch.bfloat16)


def _communicating() -> Phase | None:
    # Compiled code would have a guard on the number of phase changes.
    return None if torch.compiler.is_compiling() else communicating()


def _communicated(before: Phase | None) -> None:
    if before is not None:
        enter_phase(before)


class _GatherOverRanks(torch.autograd.Function):
    """Stacks the tensors of all ranks; backward sums each rank's gradient over the ranks."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        before = _communicating()
        dist.all_gather(gathered, mine.contiguous(), group=group)
        _communicated(before)
        return torch.stack(gathered)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        summed = gradient.contiguous()
        before = _communicating()
        dist.all_reduce(summed, group=ctx.group)
        _communicated(before)
        return summed[dist.get_rank(ctx.group)], None
