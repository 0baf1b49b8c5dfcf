"""Tree reduction: sums of a step's micro-batches whose bits don't depend on the number of ranks.

Floating-point sums depend on their order, and accumulation on one rank adds in another order than a reduction
over ranks. Here micro-batches are added by a binary tree: neighbors first, then the sums of neighbors. A rank
with a power of two of neighboring micro-batches computes one branch of the tree, and the ranks together the
rest. The order is that of a binary counter, so at most log2(micro-batches) + 1 sums are kept.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import distributed as dist
from torch.nn import functional as F

from trainer.observe.phases import communicating, enter_phase


class Sums(NamedTuple):
    """Sums over one micro-batch or several.

    Attributes:
        gradients: Gradient of each parameter.
        metrics: float64 (n,): the loss and other sums.
    """

    gradients: list[torch.Tensor]
    metrics: torch.Tensor

    def add(self, later: "Sums") -> "Sums":
        """Adds the sums of later micro-batches to these, in place."""
        torch._foreach_add_(self.gradients, later.gradients)
        self.metrics.add_(later.metrics)
        return self


class Tournament:
    """Adds sums one by one, in the order of the tree."""

    def __init__(self) -> None:
        self._branches: list[Sums] = []
        self._count = 0

    def add(self, one: Sums) -> None:
        """Adds the next sums; their tensors are kept, and changed in place."""
        self._count += 1
        count = self._count
        while count % 2 == 0:
            one = self._branches.pop().add(one)
            count //= 2
        self._branches.append(one)

    def total(self) -> Sums:
        """Returns the sum of all since the last call; there must be at least one."""
        total = self._branches.pop()
        while self._branches:
            total = self._branches.pop().add(total)
        self._count = 0
        return total


class TreeReduction:
    """Tree reduction of a step's sums over micro-batches and ranks."""

    def __init__(self, group: dist.ProcessGroup | None, bucket_mb: int) -> None:
        """Reduces over the ranks of a group in buckets of `bucket_mb` MiB; None: one rank."""
        self._group = group
        self._bucket_bytes = bucket_mb << 20
        self._own = Tournament()

    def add_micro_batch(self, gradients: list[torch.Tensor], metrics: torch.Tensor) -> None:
        """Adds a micro-batch's gradients and metrics, and takes ownership of them."""
        self._own.add(Sums(gradients, metrics))

    def end_step(self) -> Sums:
        """Returns the sums over all micro-batches of all ranks, with equal bits on each; collective."""
        own = self._own.total()
        if self._group is None:
            return own
        for bucket in _buckets(own.gradients, self._bucket_bytes):
            _over_ranks(bucket, self._group)
        _over_ranks([own.metrics], self._group)
        return own


def _buckets(tensors: Sequence[torch.Tensor], most: int) -> Iterator[list[torch.Tensor]]:
    """Yields tensors of one dtype in lists of about `most` bytes; their borders change no sum."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        bucket: list[torch.Tensor] = []
        size = 0
        for tensor in tensors:
            if tensor.dtype != dtype:  # concatenated, it would be promoted
                continue
            bucket.append(tensor)
            size += tensor.nbytes
            if size >= most:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket


def _over_ranks(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sums tensors over the ranks by the tree, in place.

    Each rank sums one slice and sends it to all: 2 (W - 1) / W of the bytes are sent and received, as by a
    ring all-reduce, while an all-gather of all tensors would receive W - 1 times the bytes.
    """
    world = dist.get_world_size(group)
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    size = flat.numel()
    flat = F.pad(flat, (0, -size % world))
    received = torch.empty_like(flat)
    before = communicating()
    dist.all_to_all_single(received, flat, group=group)
    slices = Tournament()
    nothing = received.new_empty(0, dtype=torch.float64)
    for of_rank in received.chunk(world):
        slices.add(Sums([of_rank], nothing))
    ((own,), _) = slices.total()
    dist.all_gather_into_tensor(flat, own, group=group)
    enter_phase(before)
    parts = flat[:size].split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(tensors, [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)])
