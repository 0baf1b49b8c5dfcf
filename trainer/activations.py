"""What activations cost: bytes kept for backward, and the time of computing them again.

Measured on the device with one micro-batch of zeros before the training starts, so that the log can say
what activation checkpointing costs, and a budget can be met with the least recomputation.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from trainer.errors import BadInputError
from trainer.memory import recompute

_GIB = 1 << 30


@dataclass(frozen=True)
class BlockCost:
    """What one block keeps and costs, for one micro-batch.

    Attributes:
        kept: Bytes that it keeps for backward.
        inputs: Bytes that it keeps all the same when it is checkpointed.
        flops: Floating-point operations of its forward pass; the same on every rank and in every run.
        seconds: Duration of its forward pass.
    """

    kept: int
    inputs: int
    flops: int
    seconds: float


@dataclass(frozen=True)
class ModelCost:
    """What a forward pass keeps: that of each block, and what lies outside of them.

    Attributes:
        blocks: Costs by the block's name, in the order of the forward pass.
        outside: Bytes kept outside of the blocks.
    """

    blocks: Mapping[str, BlockCost]
    outside: int

    def kept(self, checkpointed: Sequence[str] = ()) -> int:
        """Bytes kept for backward when some of the blocks are checkpointed."""
        inside = (cost.inputs if name in checkpointed else cost.kept for name, cost in self.blocks.items())
        return self.outside + sum(inside)


class KeptBytes:
    """Counts what autograd keeps, each piece of memory once; parameters are kept anyway and don't count."""

    def __init__(self, model: nn.Module) -> None:
        self._known = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._held: list[torch.Tensor] = []  # so that no address is used twice while counting
        self.bytes = 0

    def counting(self) -> AbstractContextManager[None]:
        """The context in which it counts."""
        return saved_tensors_hooks(self._count, _same)

    def _count(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._known.add(storage.data_ptr())
            self._held.append(tensor)
            self.bytes += storage.nbytes()
        return tensor


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def measure(model: nn.Module, blocks: Mapping[str, nn.Module], forward: Callable[[], Any]) -> ModelCost:
    """Runs two forward passes, with the activations of one block at a time in memory.

    Args:
        model: Holds the blocks; in training mode. Its buffers are as before afterwards.
        blocks: Blocks by name.
        forward: Calls the model on a micro-batch and returns the loss.

    Returns:
        The costs, of blocks that were called.
    """
    costs: dict[str, BlockCost] = {}
    originals = {name: block.forward for name, block in blocks.items()}

    def measured(name: str, original: Callable[..., Any], *values: Any, **named: Any) -> Any:
        values = tuple(map(_leaf, values))
        named = {key: _leaf(value) for key, value in named.items()}
        inputs = [value for value in (*values, *named.values()) if isinstance(value, torch.Tensor)]
        counted = KeptBytes(model)
        with torch.enable_grad(), counted.counting(), FlopCounterMode(display=False) as flops:
            original(*values, **named)
        started = _now(inputs)
        output = original(*values, **named)
        seconds = _now(inputs) - started
        entered = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in inputs}
        costs[name] = BlockCost(counted.bytes, sum(entered.values()), flops.get_total_flops(), seconds)
        return output

    buffers = [buffer.clone() for buffer in model.buffers()]
    outside = KeptBytes(model)
    try:
        for name, block in blocks.items():
            block.forward = functools.partial(measured, name, originals[name])
        with torch.no_grad():
            forward()
        for name, block in blocks.items():
            block.forward = originals[name]
            recompute(block)  # so that nothing inside of it is kept or counted
        with outside.counting():
            forward()
    finally:
        for name, block in blocks.items():
            block.forward = originals[name]
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
    return ModelCost(costs, outside.bytes)


def cheapest(cost: ModelCost, budget: int) -> list[str]:
    """Blocks to checkpoint so that what is kept fits, with little recomputation.

    Greedy by operations per byte that it saves, then without those that turned out not to be needed. A
    function of shapes alone, so that all ranks and every resumed run choose the same.

    Args:
        cost: From `measure`.
        budget: Bytes.

    Returns:
        Names in the order of the forward pass.

    Raises:
        BadInputError: If checkpointing every block isn't enough.
    """
    saves = {name: block.kept - block.inputs for name, block in cost.blocks.items()}
    useful = [name for name, saved in saves.items() if saved > 0]
    least = cost.kept(useful)
    if least > budget:
        raise BadInputError(
            f"memory.budget_gib={budget / _GIB:g}: with every block checkpointed a micro-batch still keeps "
            f"{least / _GIB:.3g} GiB; raise it or lower data.micro_batch"
        )
    chosen: list[str] = []
    for name in sorted(useful, key=lambda name: cost.blocks[name].flops / saves[name]):
        if cost.kept(chosen) <= budget:
            break
        chosen.append(name)
    for name in sorted(chosen, key=lambda name: -cost.blocks[name].flops):
        others = [other for other in chosen if other != name]
        if cost.kept(others) <= budget:
            chosen = others
    return [name for name in cost.blocks if name in chosen]


def seconds_of_step(model: nn.Module, forward: Callable[[], Any], device: torch.device) -> float:
    """Duration of a forward and backward pass; gradients and buffers are as before afterwards."""
    buffers = [buffer.clone() for buffer in model.buffers()]
    marker = [torch.empty(0, device=device)]
    started = _now(marker)
    forward().backward()
    seconds = _now(marker) - started
    for parameter in model.parameters():
        parameter.grad = None
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)
    return seconds


def _leaf(value: Any) -> Any:
    # In training most inputs depend on parameters; a block keeps more for those than for data.
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().requires_grad_()
    return value


def _now(tensors: Sequence[torch.Tensor]) -> float:
    if tensors and tensors[0].device.type == "cuda":
        torch.cuda.synchronize(tensors[0].device)
    return time.perf_counter()
