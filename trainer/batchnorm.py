"""Running statistics: one update per window, from all of its shards on all ranks.

Left alone, they would be updated once per micro-batch, so that the momentum would depend on the
accumulation, on the number of ranks (each keeping its own) and on activation checkpointing (counted
twice). Instead every statistic becomes the mean of what the window's shards, each starting from the value
before the window, made of it; a shard that left it out doesn't count. Without accumulation on one rank that
is what torch always does.

Momentum 1 makes BatchNorm's running buffers each shard's own statistics during a window; their mean then
makes one update.
"""

from collections.abc import Sequence

import torch
from torch import distributed as dist, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.buffers import ChangingBuffers
from trainer.parallel import sum_over_ranks


def is_batchnorm(module: nn.Module) -> bool:
    """Whether it is a BatchNorm layer with running statistics."""
    return isinstance(module, _BatchNorm) and module.running_mean is not None


class WindowStatistics:
    """The statistics that a model's forward pass keeps in its buffers; none is fine too."""

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup | None, changing: Sequence[str] = ()
    ) -> None:
        """Takes over BatchNorm's momentum, and the named other buffers (see `buffers.find_changing`)."""
        self._group = group
        layers = [m for m in model.modules() if isinstance(m, _BatchNorm) and is_batchnorm(m)]
        self._parts: list[_BatchNorms | ChangingBuffers] = [_BatchNorms(layers)] if layers else []
        if changing:
            self._parts.append(ChangingBuffers(model, changing))
        self._sums: list[torch.Tensor] = []

    def reload(self) -> None:
        """Starts from the values that are in the model now."""
        for part in self._parts:
            part.reload()

    def of_shard(self) -> list[torch.Tensor]:
        """What the last forward pass made of the statistics, float (n,) each, to add up over the shards.

        Call it before backward, where activation checkpointing runs the forward pass once more.
        """
        return [part.of_shard() for part in self._parts]

    def restore(self) -> None:
        """Call after a shard's backward pass: the next starts from the same values."""
        for part in self._parts:
            part.restore()

    def add(self, shard: list[torch.Tensor]) -> None:
        """Adds a shard's."""
        if self._sums:
            torch._foreach_add_(self._sums, shard)
        else:
            self._sums = shard

    def set_sum(self, total: torch.Tensor) -> None:
        """Takes the sum over the shards of a window, float64 (n,), that somebody else made."""
        self._sums = list(total.split([part.size for part in self._parts])) if self._parts else []

    def end_window(self, skipped: torch.Tensor | None = None) -> None:
        """Puts the updated statistics into the model.

        Args:
            skipped: float (), on the device: 1 if the window overflowed in fp16. Its statistics may hold
                infinities then, and are left out.
        """
        for part, total in zip(self._parts, self._sums, strict=True):
            part.update(sum_over_ranks(total, self._group), skipped)
        self._sums = []


class _BatchNorms:
    """Running means and variances of torch's BatchNorm layers.

    Attributes:
        size: Numbers that a shard gives: the statistics, and for each layer whether it ran.
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
        if any(layer.momentum is None for layer in layers):  # the mean of all windows
            self._cumulative = torch.tensor([layer.momentum is None for layer in layers], device=device)
        for layer in layers:
            layer.momentum = 1.0
        self._momenta = torch.tensor(momenta, device=device)
        self._owners = torch.tensor(owners, device=device)
        self._sizes = [buffer.numel() for buffer in self._buffers]
        self.size = len(owners) + len(layers)
        self.reload()

    def reload(self) -> None:
        self._kept = torch.cat(self._buffers)
        self._windows = torch.stack(self._counters)
        self._before = self._windows.clone()

    def of_shard(self) -> torch.Tensor:
        # A layer that was left out holds the shard's before: its counter tells, also of compiled code.
        ran = torch.stack(self._counters) != self._before
        self.restore()
        values = torch.where(ran[self._owners], torch.cat(self._buffers), 0.0)
        return torch.cat((values, ran.to(values.dtype)))

    def restore(self) -> None:
        self._before = torch.stack(self._counters)

    def update(self, total: torch.Tensor, skipped: torch.Tensor | None) -> None:
        sums, counts = total.to(self._kept.dtype).split((len(self._owners), len(self._counters)))
        ran = counts > 0 if skipped is None else (counts > 0) & (skipped == 0)
        self._windows += ran
        momenta = self._momenta
        if self._cumulative is not None:
            momenta = torch.where(self._cumulative, 1 / self._windows.clamp(min=1), momenta)
        of_layers = torch.stack((counts.clamp(min=1), momenta.to(counts.dtype), ran.to(counts.dtype)))
        count, momentum, had = of_layers[:, self._owners]
        updated = torch.lerp(self._kept, sums / count, momentum)
        self._kept = torch.where(had > 0, updated, self._kept)
        torch._foreach_copy_(self._buffers, self._kept.split(self._sizes))
        torch._foreach_copy_(self._counters, self._windows.unbind())
        self.restore()
