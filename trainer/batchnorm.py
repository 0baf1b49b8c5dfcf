"""BatchNorm's running statistics: one update per window, from all of its shards on all ranks.

Left alone, they would be updated once per micro-batch, so that the momentum would depend on the
accumulation, on the number of ranks (each keeping its own) and on activation checkpointing (counted
twice). Instead momentum 1 makes the running buffers each shard's own statistics during a window; their
mean then makes one update. Without accumulation on one rank that is what BatchNorm always does.
"""

import torch
from torch import distributed as dist, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.parallel import sum_over_ranks


class WindowStatistics:
    """The running statistics of all BatchNorm layers of a model; none is fine too."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        """Takes over the layers' momentum."""
        layers = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
        self._group = group
        self._buffers: list[torch.Tensor] = []
        self._counters = [m.num_batches_tracked for m in layers if m.num_batches_tracked is not None]
        momenta: list[torch.Tensor] = []
        for layer in layers:
            for buffer in (layer.running_mean, layer.running_var):
                assert buffer is not None
                self._buffers.append(buffer)
                momenta.append(torch.full_like(buffer, 0.1 if layer.momentum is None else layer.momentum))
            layer.momentum = 1.0
        if self._buffers:
            self._momentum = torch.cat(momenta)
            self._sizes = [buffer.numel() for buffer in self._buffers]
        self._kept = self._sum = next(model.parameters()).detach().new_empty(0)
        self.reload()

    def reload(self) -> None:
        """Starts from the values that are in the model now."""
        if not self._buffers:
            return
        self._kept = torch.cat(self._buffers)
        self._sum = torch.zeros_like(self._kept)
        self._windows = [counter.clone() for counter in self._counters]

    def add_shard(self) -> None:
        """Call after a shard's backward pass."""
        if self._buffers:
            self._sum += torch.cat(self._buffers)

    def of_shard(self) -> torch.Tensor:
        """The statistics of the shard whose backward pass was last, float64 (n,), for somebody else's sum."""
        return torch.cat(self._buffers or [self._kept]).double()

    def set_sum(self, total: torch.Tensor) -> None:
        """Takes the sum over the shards of a window, float64 (n,), that somebody else made."""
        self._sum.copy_(total)

    def end_window(self, shards: int, skipped: torch.Tensor | None = None) -> None:
        """Puts the updated statistics into the model.

        Args:
            shards: Shards of the window over all ranks.
            skipped: float (), on the device: 1 if the window overflowed in fp16. Its statistics may hold
                infinities then, and are left out.
        """
        if not self._buffers:
            return
        sum_over_ranks(self._sum, self._group)
        updated = torch.lerp(self._kept, self._sum / shards, self._momentum)
        self._kept = updated if skipped is None else torch.where(skipped > 0, self._kept, updated)
        torch._foreach_copy_(self._buffers, self._kept.split(self._sizes))
        self._sum.zero_()
        torch._foreach_add_(self._windows, 1)
        torch._foreach_copy_(self._counters, self._windows)
