"""Cost of activations: bytes kept for backward, and the time to recompute them.

It is measured on the device with one micro-batch of zeros before the training starts, to report the cost of
activation checkpointing, and to meet a memory budget with little recomputation.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from trainer.config.sizes import GIB
from trainer.errors import BadInputError
from trainer.models.activation_checkpointing import recompute

_TIMES, _LONG_SECONDS = 3, 2.0


@dataclass(frozen=True)
class BlockCost:
    """Savings and cost of checkpointing one block, for one micro-batch.

    Attributes:
        saved: Bytes that it no longer keeps for backward. Its inputs are kept in any case, and its output by
            the next block.
        flops: Floating-point operations of its forward pass; the same on every rank and in every run.
        seconds: Duration of its forward pass.
    """

    saved: int
    flops: int
    seconds: float


@dataclass(frozen=True)
class ModelCost:
    """Memory that a forward pass keeps for backward.

    Attributes:
        blocks: Costs by the block's name, in the order of the forward pass.
        least: Bytes kept when all blocks are checkpointed.
    """

    blocks: Mapping[str, BlockCost]
    least: int

    def kept(self, checkpointed: Sequence[str] = ()) -> int:
        """Returns the bytes kept when these blocks are checkpointed."""
        return self.least + sum(c.saved for name, c in self.blocks.items() if name not in checkpointed)

    def again(self, checkpointed: Sequence[str]) -> int:
        """Returns the largest number of extra bytes while backward recomputes one of these blocks."""
        return max((self.blocks[name].saved for name in checkpointed if name in self.blocks), default=0)


class KeptBytes:
    """Counts the bytes that autograd keeps, each storage once, without those of the tensors in `anyway`."""

    def __init__(self, anyway: Iterable[torch.Tensor]) -> None:
        self._anyway = set(map(_place, anyway))
        # References, so that no address is reused while counting.
        self._kept: dict[int, torch.Tensor] = {}

    def counting(self) -> AbstractContextManager[None]:
        """Returns the context in which it counts."""
        return saved_tensors_hooks(self._count, _same)

    def _count(self, tensor: torch.Tensor) -> torch.Tensor:
        # A reference to the tensor itself would close a cycle in C++ for an operation that saves its output,
        # which only a backward pass breaks (pytorch#189025): the graph before it would leak.
        saved, place = tensor.detach(), _place(tensor)
        if place not in self._anyway:
            self._kept[place] = saved
        return saved

    def bytes_without(self, output: Any = None) -> int:
        """Returns the bytes kept, without those of the output, which the next block keeps."""
        if isinstance(output, torch.Tensor):
            self._kept.pop(_place(output), None)
        return sum(tensor.untyped_storage().nbytes() for tensor in self._kept.values())


def _place(tensor: torch.Tensor) -> int:
    """Identifies a tensor's memory, also on the meta device."""
    address: int = tensor.untyped_storage()._cdata
    return address


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def measure(
    model: nn.Module, blocks: Mapping[str, nn.Module], forward: Callable[[], Any], *, timed: bool = True
) -> ModelCost:
    """Runs two forward passes, with the activations of one block at a time in memory.

    Args:
        model: Model with the blocks, in training mode. Its buffers are restored afterwards.
        blocks: Blocks by name.
        forward: Calls the model on a micro-batch and returns the loss.
        timed: False to skip the timing; all seconds are 0 then.

    Returns:
        Costs of the blocks that were called.
    """
    costs: dict[str, BlockCost] = {}
    originals = {name: block.forward for name, block in blocks.items()}

    def measured(name: str, original: Callable[..., Any], *values: Any, **named: Any) -> Any:
        values = tuple(map(_leaf, values))
        named = {key: _leaf(value) for key, value in named.items()}
        inputs = [value for value in (*values, *named.values()) if isinstance(value, torch.Tensor)]
        inside = KeptBytes((*model.parameters(), *inputs))
        versions = [value._version for value in inputs]
        with torch.enable_grad(), inside.counting(), FlopCounterMode(display=False) as flops:
            output = original(*values, **named)
            saved = inside.bytes_without(output)
        if versions != [value._version for value in inputs]:
            raise BadInputError(
                f"activation checkpointing: '{name}' changes its input in place and can't be computed "
                "twice; choose what lies around it"
            )
        if not timed:
            costs[name] = BlockCost(saved, flops.get_total_flops(), 0.0)
            return output
        del output  # frees its graph
        output, seconds = _timed(lambda: original(*values, **named), inputs)
        costs[name] = BlockCost(saved, flops.get_total_flops(), seconds)
        return output

    least = KeptBytes(model.parameters())
    with _buffers_kept(model):
        try:
            for name, block in blocks.items():
                block.forward = functools.partial(measured, name, originals[name])
            with torch.no_grad():
                forward()
            for name, block in blocks.items():
                block.forward = originals[name]
                recompute(block)
            with least.counting():
                forward()
        finally:
            for name, block in blocks.items():
                block.forward = originals[name]
    return ModelCost(costs, least.bytes_without())


def cheapest(cost: ModelCost, budget: float) -> list[str]:
    """Chooses blocks to checkpoint so that the kept bytes fit a budget, with little recomputation.

    It is greedy by operations per saved byte, then drops blocks that aren't needed. It depends on shapes
    alone, so that all ranks and every resumed run choose the same.

    Args:
        cost: From `measure`.
        budget: Bytes.

    Returns:
        Names in the order of the forward pass.

    Raises:
        BadInputError: If checkpointing every block isn't enough.
    """
    useful = [name for name, block in cost.blocks.items() if block.saved > 0]
    least = cost.kept(useful)
    if least > budget:
        raise BadInputError(
            f"memory.budget_gib={budget / GIB:g}: with every block checkpointed a micro-batch still keeps "
            f"{least / GIB:.3g} GiB; raise it or lower data.micro_batch_size"
        )
    chosen: list[str] = []
    for name in sorted(useful, key=lambda name: cost.blocks[name].flops / cost.blocks[name].saved):
        if cost.kept(chosen) <= budget:
            break
        chosen.append(name)
    for name in sorted(chosen, key=lambda name: -cost.blocks[name].flops):
        others = [other for other in chosen if other != name]
        if cost.kept(others) <= budget:
            chosen = others
    return [name for name in cost.blocks if name in chosen]


def seconds_of_step(model: nn.Module, forward: Callable[[], Any], device: torch.device) -> float:
    """Returns the seconds of a forward and backward pass; gradients and buffers are restored."""
    with _buffers_kept(model):
        forward().backward()  # warm-up: allocations, and choice of kernels
        _, seconds = _timed(lambda: forward().backward(), [torch.empty(0, device=device)])
    model.zero_grad()
    return seconds


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    buffers = [buffer.clone() for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)


def _leaf(value: Any) -> Any:
    # In training most inputs need a gradient, for which a block keeps more.
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        with torch.enable_grad():  # cloned, as a block may not change a leaf in place
            return value.detach().requires_grad_().clone()
    return value


def _timed(work: Callable[[], Any], where: Sequence[torch.Tensor]) -> tuple[Any, float]:
    """Returns the result of `work` and the median of its seconds over three calls, or one long one."""
    seconds: list[float] = []
    while len(seconds) < _TIMES and sum(seconds) < _LONG_SECONDS:
        started = _now(where)
        result = work()
        seconds.append(_now(where) - started)
    return result, statistics.median(seconds)


def _now(tensors: Sequence[torch.Tensor]) -> float:
    if tensors and tensors[0].device.type == "cuda":
        torch.cuda.synchronize(tensors[0].device)
    return time.perf_counter()
