"""Running statistics: one update per step, from all of its micro-batches on all ranks.

torch updates them once per micro-batch, so that the momentum depends on accumulation, on the number of ranks
(each keeps its own statistics) and on activation checkpointing (counted twice). Here each statistic becomes
the mean over the step's micro-batches, each of which starts from the value before the step; micro-batches in
which the layer didn't run don't count. Within a micro-batch torch's own code updates them, at each call of
the layer, so without accumulation on one rank they are torch's, to the bit. A count of calls moves by the
micro-batches' rounded mean.
"""

from typing import Any

import torch
from torch import distributed as dist, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.distributed.overlap import sharing
from trainer.distributed.parallel import sum_over_ranks
from trainer.models.buffers import ChangingBuffers, FoundBuffers
from trainer.models.finetune import keeps_statistics
from trainer.observe.phases import Phase, communicating, enter_phase


def batchnorm_buffers(model: nn.Module) -> list[torch.Tensor]:
    """Returns the buffers of torch's BatchNorm layers."""
    return [buffer for layer in _layers(model) for buffer in layer.buffers(recurse=False)]


def _layers(model: nn.Module) -> list[_BatchNorm]:
    """Returns the BatchNorm layers with running statistics and torch's own forward.

    A layer with another forward may count no batches, or use the momentum in another way.
    """
    return [
        module
        for module in model.modules()
        if isinstance(module, _BatchNorm)
        and type(module).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward)
        and None not in (module.running_mean, module.running_var, module.num_batches_tracked)
    ]


class StepStatistics:
    """Statistics that a model's forward pass keeps in buffers, updated once per step; there may be none."""

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup | None, found: FoundBuffers | None = None
    ) -> None:
        """Takes over BatchNorm's buffers, and the other changing ones in `found`."""
        self._group = group
        layers = _layers(model)
        self._parts: list[_BatchNorms | ChangingBuffers] = [_BatchNorms(layers)] if layers else []
        if found is not None and found.changing:
            self._parts.append(ChangingBuffers(model, found.changing, found.alike))
        self._sums: list[torch.Tensor] = []

    def reload(self) -> None:
        """Starts from the values that are in the model now."""
        for part in self._parts:
            part.reload()

    def of_micro_batch(self) -> list[torch.Tensor]:
        """Returns the statistics after the last forward pass, float (n,) each, to sum over micro-batches.

        Call it before backward, in which activation checkpointing repeats the forward pass.
        """
        return [part.of_micro_batch() for part in self._parts] if self._parts else []

    def restore(self) -> None:
        """Restores the values from before the step; call it before each further micro-batch."""
        for part in self._parts:
            part.restore()

    def add(self, micro_batch: list[torch.Tensor]) -> None:
        """Adds the statistics of a micro-batch."""
        if self._sums:
            torch._foreach_add_(self._sums, micro_batch)
        else:
            self._sums = micro_batch

    def set_sum(self, total: torch.Tensor) -> None:
        """Sets the sum over a step's micro-batches, float64 (n,), of a tree reduction."""
        self._sums = list(total.split([part.size for part in self._parts])) if self._parts else []

    def end_step(self, skipped: torch.Tensor | None = None) -> None:
        """Puts the updated statistics into the model.

        Args:
            skipped: float (), on the device: 1 if the step overflowed in fp16; its statistics are dropped,
                since they may hold infinities.
        """
        for part, total in zip(self._parts, self._sums, strict=True):
            part.update(sum_over_ranks(total, self._group), skipped)
        self._sums = []


class _BatchNorms:
    """Running means and variances of torch's BatchNorm layers.

    Attributes:
        size: Length of a micro-batch's vector: the statistics, and for each layer a flag if it ran, and its
            number of calls.
    """

    def __init__(self, layers: list[_BatchNorm]) -> None:
        device = next(b.device for b in layers[0].buffers())
        self._buffers: list[torch.Tensor] = []
        self._counters: list[torch.Tensor] = []
        owners: list[int] = []
        for number, layer in enumerate(layers):
            assert layer.running_mean is not None
            assert layer.running_var is not None
            assert layer.num_batches_tracked is not None
            self._buffers += [layer.running_mean, layer.running_var]
            self._counters.append(layer.num_batches_tracked)
            owners += [number] * (2 * layer.running_mean.numel())
            if layer.momentum is None:
                _average_all_calls(layer)
        # In bf16 the sums over micro-batches would be too coarse.
        self._dtype = torch.promote_types(torch.float32, torch.cat(self._buffers).dtype)
        self._rounds = any(buffer.dtype != self._dtype for buffer in self._buffers)
        self._owners = torch.tensor(owners, device=device)
        self._together = _together(layers, device)
        self._sizes = [buffer.numel() for buffer in self._buffers]
        self.size = len(owners) + 2 * len(layers)
        self.reload()

    def reload(self) -> None:
        self._keep(torch.cat(self._buffers).to(self._dtype), torch.stack(self._counters))

    def _keep(self, statistics: torch.Tensor, counts: torch.Tensor) -> None:
        self._kept, self._counts = statistics, counts
        self._parts = statistics.split(self._sizes)

    def of_micro_batch(self) -> torch.Tensor:
        # A layer that didn't run has an unchanged counter, also in compiled code.
        calls = torch.stack(self._counters) - self._counts
        ran = calls if self._together is None else self._together @ calls.to(self._together.dtype)
        ran = ran > 0
        values = torch.where(ran.gather(0, self._owners), torch.cat(self._buffers), 0.0)
        return torch.cat((values, ran, calls)).to(self._dtype)

    def restore(self) -> None:
        torch._foreach_copy_(self._buffers, self._parts)
        torch._foreach_copy_(self._counters, self._counts.unbind())

    def update(self, total: torch.Tensor, skipped: torch.Tensor | None) -> None:
        layers = len(self._counters)
        sums, micro_batches, calls = total.to(self._dtype).split((len(self._owners), layers, layers))
        ran = micro_batches > 0 if skipped is None else (micro_batches > 0) & (skipped == 0)
        micro_batches = micro_batches.clamp(min=1)
        new_calls = torch.where(ran, (calls / micro_batches).round(), 0.0).to(self._counts.dtype)
        divisor, has_run = torch.stack((micro_batches, ran)).gather(1, self._owners.expand(2, -1))
        self._keep(torch.where(has_run > 0, sums / divisor, self._kept), self._counts + new_calls)
        self.restore()
        if self._rounds:  # continue with the rounded values, as after a resume
            self._keep(torch.cat(self._buffers).to(self._dtype), self._counts)


def _together(layers: list[_BatchNorm], device: torch.device) -> torch.Tensor | None:
    """Returns a 0/1 matrix (layers, layers) of layers that share statistics; None if none do."""
    names = {f"{number} {name}": b for number, one in enumerate(layers) for name, b in one.named_buffers()}
    if not (groups := sharing(names)):
        return None
    matrix = torch.eye(len(layers), device=device)
    for group in groups:
        members = torch.tensor([int(name.split()[0]) for name in group], device=device)
        matrix[members[:, None], members] = 1.0
    return matrix


def _average_all_calls(layer: _BatchNorm) -> None:
    """Makes a layer with momentum=None average over all calls without a synchronization for its count.

    With momentum 1 its buffers are each call's own statistics, whose mean over all calls is computed here.
    """
    layer.momentum = 1.0
    before: list[torch.Tensor] = []

    def begin(layer: Any, _: Any) -> None:
        before[:] = (layer.running_mean.clone(), layer.running_var.clone()) if layer.training else ()

    def end(layer: Any, *_: Any) -> None:
        for buffer, previous in zip((layer.running_mean, layer.running_var), before, strict=False):
            dtype = torch.promote_types(torch.float32, previous.dtype)
            mean = torch.lerp(previous.to(dtype), buffer.to(dtype), 1 / layer.num_batches_tracked.to(dtype))
            buffer.data.copy_(mean)  # by `data`, as autograd's version counter must not see it, as in torch
        before.clear()

    layer.register_forward_pre_hook(begin)
    layer.register_forward_hook(end)


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
