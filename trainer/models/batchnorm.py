"""Running statistics: one update per step, from all of its micro-batches on all ranks.

Nothing of torch's does this: there they are updated once per micro-batch, so that the momentum would depend
on the accumulation, on the number of ranks (each keeping its own) and on activation checkpointing (counted
twice). Instead every statistic becomes the mean of what the step's micro-batches, each starting from the
value before the step, made of it; a micro-batch that left it out doesn't count. Within a micro-batch torch's
own code updates them, at each call of the layer. So without accumulation on one rank they are torch's, to
the bit. A count of calls moves by those of a micro-batch, rounded where micro-batches differ.
"""

from typing import Any

import torch
from torch import distributed as dist, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.distributed.overlap import sharing
from trainer.distributed.parallel import sum_over_ranks
from trainer.models.buffers import ChangingBuffers, FoundBuffers


def batchnorm_buffers(model: nn.Module) -> list[torch.Tensor]:
    """The statistics of torch's BatchNorm layers."""
    return [buffer for layer in _layers(model) for buffer in layer.buffers(recurse=False)]


def _layers(model: nn.Module) -> list[_BatchNorm]:
    """BatchNorm layers with running statistics that compute as torch's do.

    One with a forward of its own may count no batches, or take the momentum otherwise.
    """
    return [
        module
        for module in model.modules()
        if isinstance(module, _BatchNorm)
        and type(module).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward)
        and None not in (module.running_mean, module.running_var, module.num_batches_tracked)
    ]


class StepStatistics:
    """The statistics that a model's forward pass keeps in its buffers; none is fine too."""

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup | None, found: FoundBuffers | None = None
    ) -> None:
        """Takes over BatchNorm's buffers, and others that were found to change."""
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
        """Returns the statistics after the last forward pass, float (n,) each, to be summed over
        micro-batches.

        Call it before backward, where activation checkpointing runs the forward pass once more.
        """
        return [part.of_micro_batch() for part in self._parts] if self._parts else []

    def restore(self) -> None:
        """Call before a step's next micro-batch: it starts from the same values as the one before."""
        for part in self._parts:
            part.restore()

    def add(self, micro_batch: list[torch.Tensor]) -> None:
        """Adds a micro-batch's."""
        if self._sums:
            torch._foreach_add_(self._sums, micro_batch)
        else:
            self._sums = micro_batch

    def set_sum(self, total: torch.Tensor) -> None:
        """Takes the sum over the micro-batches of a step, float64 (n,), that somebody else made."""
        self._sums = list(total.split([part.size for part in self._parts])) if self._parts else []

    def end_step(self, skipped: torch.Tensor | None = None) -> None:
        """Puts the updated statistics into the model.

        Args:
            skipped: float (), on the device: 1 if the step overflowed in fp16. Its statistics may hold
                infinities then, and are left out.
        """
        for part, total in zip(self._parts, self._sums, strict=True):
            part.update(sum_over_ranks(total, self._group), skipped)
        self._sums = []


class _BatchNorms:
    """Running means and variances of torch's BatchNorm layers.

    Attributes:
        size: Numbers that a micro-batch gives: the statistics, and for each layer whether it ran, and how
            many times.
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
        # Where they are bf16, these couldn't count so many micro-batches.
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
        # A layer that was left out tells by its counter, also in compiled code.
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
        counted = torch.where(ran, (calls / micro_batches).round(), 0.0).to(self._counts.dtype)
        over, of_those = torch.stack((micro_batches, ran)).gather(1, self._owners.expand(2, -1))
        self._keep(torch.where(of_those > 0, sums / over, self._kept), self._counts + counted)
        self.restore()
        if self._rounds:  # go on from what a checkpoint holds
            self._keep(torch.cat(self._buffers).to(self._dtype), self._counts)


def _together(layers: list[_BatchNorm], device: torch.device) -> torch.Tensor | None:
    """Matrix (layers, layers) of layers that share statistics: which of them ran if one did."""
    names = {f"{number} {name}": b for number, one in enumerate(layers) for name, b in one.named_buffers()}
    if not (groups := sharing(names)):
        return None
    matrix = torch.eye(len(layers), device=device)
    for group in groups:
        members = torch.tensor([int(name.split()[0]) for name in group], device=device)
        matrix[members[:, None], members] = 1.0
    return matrix


def _average_all_calls(layer: _BatchNorm) -> None:
    """Lets a layer with momentum=None compute as torch's does, but without a wait of the host for its count.

    Momentum 1 makes its buffers each call's own statistics, of which the mean over all calls is made here.
    """
    layer.momentum = 1.0
    before: list[torch.Tensor] = []

    def begin(layer: Any, _: Any) -> None:
        before[:] = (layer.running_mean.clone(), layer.running_var.clone()) if layer.training else ()

    def end(layer: Any, *_: Any) -> None:
        for buffer, was in zip((layer.running_mean, layer.running_var), before, strict=False):
            kind = torch.promote_types(torch.float32, was.dtype)
            mean = torch.lerp(was.to(kind), buffer.to(kind), 1 / layer.num_batches_tracked.to(kind))
            buffer.data.copy_(mean)  # by `data`: autograd keeps each call's, and torch changes it unseen, too
        before.clear()

    layer.register_forward_pre_hook(begin)
    layer.register_forward_hook(end)
