"""Cost of activations: bytes kept for backward, and the time to recompute them.

Measured on the device with one micro-batch of zeros before the training starts, so that the log can say
what activation checkpointing costs, and a budget can be met with the least recomputation.
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
        saved: Bytes that it doesn't keep for backward then. Its inputs are kept all the same, and its
            output by the block that takes it.
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
        least: Bytes kept when all of them are checkpointed.
    """

    blocks: Mapping[str, BlockCost]
    least: int

    def kept(self, checkpointed: Sequence[str] = ()) -> int:
        """Bytes kept when some of the blocks are checkpointed."""
        return self.least + sum(c.saved for name, c in self.blocks.items() if name not in checkpointed)

    def again(self, checkpointed: Sequence[str]) -> int:
        """Bytes at most that backward keeps on top while it computes one of these blocks again."""
        return max((self.blocks[name].saved for name in checkpointed if name in self.blocks), default=0)


class KeptBytes:
    """Counts what autograd keeps, each piece of memory once; `anyway` is kept anyway and doesn't count."""

    def __init__(self, anyway: Iterable[torch.Tensor]) -> None:
        self._anyway = set(map(_place, anyway))
        # Held, so that no address is used twice while counting.
        self._kept: dict[int, torch.Tensor] = {}

    def counting(self) -> AbstractContextManager[None]:
        """The context in which it counts."""
        return saved_tensors_hooks(self._count, _same)

    def _count(self, tensor: torch.Tensor) -> torch.Tensor:
        # The tensor itself, kept for an operation that saves its output, would close a cycle within C++ that
        # only a backward pass breaks (pytorch#189025): all that lies before it would stay for ever.
        saved, place = tensor.detach(), _place(tensor)
        if place not in self._anyway:
            self._kept[place] = saved
        return saved

    def bytes_without(self, output: Any = None) -> int:
        """Bytes kept, but for those of a tensor that whoever takes it keeps anyway."""
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
        model: Holds the blocks; in training mode. Its buffers are as before afterwards.
        blocks: Blocks by name.
        forward: Calls the model on a micro-batch and returns the loss.
        timed: Whether it takes time as in training; otherwise all seconds are 0.

    Returns:
        The costs, of blocks that were called.
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
        del output  # and all that it keeps
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
    """Duration of a forward and backward pass; gradients and buffers are as before afterwards."""
    with _buffers_kept(model):
        forward().backward()  # warms up: the first has memory to find and kernels to choose
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
    # In training most inputs depend on parameters; a block keeps more for those than for data.
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        with torch.enable_grad():  # and no leaf, which a block might not change in place
            return value.detach().requires_grad_().clone()
    return value


def _timed(work: Callable[[], Any], where: Sequence[torch.Tensor]) -> tuple[Any, float]:
    """Returns work's result and its seconds: the median of three, of one if that takes long."""
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
