"""BatchNorm's running statistics: one update per window, from all of its shards on all ranks.

Left alone, they would be updated once per micro-batch, so that the momentum would depend on the
accumulation, on the number of ranks (each keeping its own) and on activation checkpointing (counted
twice). Instead momentum 1 makes the running buffers each shard's own statistics during a window; their
mean then makes one update. Without accumulation on one rank that is what BatchNorm always does.
"""

import torch
from torch import distributed as dist, nn
from torch.nn.modules.batchnorm import _BatchNorm


class WindowStatistics:
    """The running statistics of all BatchNorm layers of a model; none is fine too."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        """Takes over the layers' momentum."""
        layers = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
        self._group = group
        self._buffers: list[torch.Tensor] = []
        self._counters = [m.num_batches_tracked for m in layers if m.num_batches_tracked is not None]
        self._momenta: list[float] = []
        for layer in layers:
            assert layer.running_mean is not None
            assert layer.running_var is not None
            self._buffers += [layer.running_mean, layer.running_var]
            self._momenta += [0.1 if layer.momentum is None else layer.momentum] * 2
            layer.momentum = 1.0
        self.reload()

    def reload(self) -> None:
        """Starts from the values that are in the model now."""
        self._kept = [buffer.clone() for buffer in self._buffers]
        self._sums = [torch.zeros_like(buffer) for buffer in self._buffers]
        self._windows = [counter.clone() for counter in self._counters]

    def add_shard(self) -> None:
        """Call after a shard's backward pass."""
        if self._buffers:
            torch._foreach_add_(self._sums, self._buffers)

    def end_window(self, shards: int) -> None:
        """Puts the updated statistics into the model.

        Args:
            shards: Shards of the window over all ranks.
        """
        if not self._buffers:
            return
        if self._group is not None:
            flat = torch.cat([part.flatten() for part in self._sums])
            dist.all_reduce(flat, group=self._group)
            parts = flat.split([part.numel() for part in self._sums])
            torch._foreach_copy_(self._sums, [p.view_as(s) for p, s in zip(parts, self._sums, strict=True)])
        torch._foreach_mul_(self._sums, [momentum / shards for momentum in self._momenta])
        torch._foreach_mul_(self._kept, [1 - momentum for momentum in self._momenta])
        torch._foreach_add_(self._kept, self._sums)
        torch._foreach_copy_(self._buffers, self._kept)
        torch._foreach_add_(self._windows, 1)
        torch._foreach_copy_(self._counters, self._windows)
        torch._foreach_zero_(self._sums)
