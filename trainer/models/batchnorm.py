"""Running statistics: one update per step, from all of its micro-batches on all ranks.

Nothing of torch's does this: there they are updated once per micro-batch, so that the momentum would depend
on the accumulation, on the number of ranks (each keeping its own) and on activation checkpointing (counted
twice). Instead every statistic becomes the mean of what the step's micro-batches, each starting from the
value before the step, made of it; a micro-batch that left it out doesn't count. Without accumulation on one
rank that is what torch always does.

Momentum 1 makes BatchNorm's running buffers each micro-batch's own statistics during a step; their mean then
makes one update.
"""

import torch
from torch import distributed as dist, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.distributed.parallel import sum_over_ranks
from trainer.models.buffers import ChangingBuffers, FoundBuffers, OtherBuffers


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
        """Takes over BatchNorm's momentum, and other buffers that were found to change."""
        self._group = group
        layers = _layers(model)
        self._parts: list[_BatchNorms | ChangingBuffers] = [_BatchNorms(layers)] if layers else []
        if found is not None and found.changing:
            self._parts.append(ChangingBuffers(model, found.changing, found.alike))
        self._others = OtherBuffers(model, found.others) if found is not None and found.others else None
        self._sums: list[torch.Tensor] = []

    def reload(self) -> None:
        """Starts from the values that are in the model now."""
        for part in self._parts:
            part.reload()
        if self._others is not None:
            self._others.reload()

    def of_micro_batch(self) -> list[torch.Tensor]:
        """What the last forward pass made of the statistics, float (n,) each, to add up over micro-batches.

        Call it before backward, where activation checkpointing runs the forward pass once more.
        """
        return [part.of_micro_batch() for part in self._parts] if self._parts else []

    def restore(self) -> None:
        """Call after a micro-batch's backward pass: the next starts from the same values."""
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
        if self._others is not None:
            self._others.tell()


class _BatchNorms:
    """Running means and variances of torch's BatchNorm layers.

    Attributes:
        size: Numbers that a micro-batch gives: the statistics, and for each layer whether it ran.
    """

    def __init__(self, layers: list[_BatchNorm]) -> None:
        device = next(b.device for b in layers[0].buffers())
        self._buffers: list[torch.Tensor] = []
        self._counters: list[torch.Tensor] = []
        momenta: list[float] = []
        owners: list[int] = []
        for number, layer in enumerate(layers):
            assert layer.running_mean is not None
            assert layer.running_var is not None
            assert layer.num_batches_tracked is not None
            self._buffers += [layer.running_mean, layer.running_var]
            self._counters.append(layer.num_batches_tracked)
            momenta.append(0.0 if layer.momentum is None else layer.momentum)
            owners += [number] * (2 * layer.running_mean.numel())
        self._cumulative: torch.Tensor | None = None
        if any(layer.momentum is None for layer in layers):  # the mean of all steps
            self._cumulative = torch.tensor([layer.momentum is None for layer in layers], device=device)
        for layer in layers:
            layer.momentum = 1.0
        # Where they are bf16, these couldn't count so many micro-batches.
        self._dtype = torch.promote_types(torch.float32, torch.cat(self._buffers).dtype)
        self._rounds = any(buffer.dtype != self._dtype for buffer in self._buffers)
        self._momenta = torch.tensor(momenta, dtype=self._dtype, device=device)
        self._owners = torch.tensor(owners, device=device)
        self._sizes = [buffer.numel() for buffer in self._buffers]
        self.size = len(owners) + len(layers)
        self.reload()

    def reload(self) -> None:
        self._kept = torch.cat(self._buffers).to(self._dtype)
        self._before = self._steps = torch.stack(self._counters)

    def of_micro_batch(self) -> torch.Tensor:
        # A layer that was left out holds the micro-batch's before: its counter tells, also of compiled code.
        now = torch.stack(self._counters)
        ran, self._before = now != self._before, now
        values = torch.where(ran.gather(0, self._owners), torch.cat(self._buffers), 0.0)
        return torch.cat((values, ran)).to(self._dtype)

    def restore(self) -> None:
        self._before = torch.stack(self._counters)

    def update(self, total: torch.Tensor, skipped: torch.Tensor | None) -> None:
        sums, counts = total.to(self._dtype).split((len(self._owners), len(self._counters)))
        ran = counts > 0 if skipped is None else (counts > 0) & (skipped == 0)
        self._steps = self._steps + ran
        momenta = self._momenta
        if self._cumulative is not None:
            momenta = torch.where(self._cumulative, 1 / self._steps.clamp(min=1), momenta)
        of_layers = torch.stack((counts.clamp(min=1), momenta * ran))  # no step for a layer that didn't run
        count, momentum = of_layers.gather(1, self._owners.expand(2, -1))
        updated = torch.lerp(self._kept, sums / count, momentum)
        self._kept = updated if skipped is None else torch.where(skipped > 0, self._kept, updated)
        torch._foreach_copy_(self._buffers, self._kept.split(self._sizes))
        if self._rounds:  # go on from what a checkpoint holds
            self._kept = torch.cat(self._buffers).to(self._dtype)
        torch._foreach_copy_(self._counters, self._steps.unbind())
        self._before = self._steps
