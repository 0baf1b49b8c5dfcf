"""Bytes of activations kept for backward, with and without checkpointing.

They are counted with one micro-batch of zeros before the training starts, to report what activation
checkpointing saves.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from trainer.errors import BadInputError
from trainer.models.activation_checkpointing import recompute


@dataclass(frozen=True)
class ModelCost:
    """Memory that a forward pass of one micro-batch keeps for backward.

    Attributes:
        saved: Bytes that checkpointing a block saves, by its name, in the order of the forward pass. Its
            inputs are kept in any case, and its output by the next block.
        least: Bytes kept when all blocks are checkpointed.
    """

    saved: Mapping[str, int]
    least: int

    def kept(self, checkpointed: Sequence[str] = ()) -> int:
        """Returns the bytes kept when these blocks are checkpointed."""
        return self.least + sum(saved for name, saved in self.saved.items() if name not in checkpointed)

    def again(self, checkpointed: Sequence[str]) -> int:
        """Returns the largest number of extra bytes while backward recomputes one of these blocks."""
        return max((self.saved[name] for name in checkpointed if name in self.saved), default=0)


class KeptBytes:
    """Counts the bytes that autograd keeps, each storage once, without those of the tensors in `anyway`."""

    def __init__(self, anyway: Iterable[torch.Tensor]) -> None:
        self._anyway = set(map(_storage, anyway))
        # References, so that no address is reused while counting.
        self._kept: dict[int, torch.Tensor] = {}

    def counting(self) -> AbstractContextManager[None]:
        """Returns the context in which it counts."""
        return saved_tensors_hooks(self._count, _same)

    def _count(self, tensor: torch.Tensor) -> torch.Tensor:
        # A reference to the tensor itself would close a cycle in C++ for an operation that saves its output,
        # which only a backward pass breaks (pytorch#189025): the graph before it would leak.
        saved, storage = tensor.detach(), _storage(tensor)
        if storage not in self._anyway:
            self._kept[storage] = saved
        return saved

    def bytes_without(self, output: Any = None) -> int:
        """Returns the bytes kept, without those of the output, which the next block keeps."""
        if isinstance(output, torch.Tensor):
            self._kept.pop(_storage(output), None)
        return sum(tensor.untyped_storage().nbytes() for tensor in self._kept.values())


def _storage(tensor: torch.Tensor) -> int:
    """Identifies a tensor's memory, also on the meta device."""
    address: int = tensor.untyped_storage()._cdata
    return address


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def measure(model: nn.Module, blocks: Mapping[str, nn.Module], forward: Callable[[], Any]) -> ModelCost:
    """Runs two forward passes, with the activations of one block at a time in memory.

    Args:
        model: Model with the blocks, in training mode. Its buffers are restored afterwards.
        blocks: Blocks by name.
        forward: Calls the model on a micro-batch and returns the loss.

    Returns:
        Bytes of the blocks that were called.

    Raises:
        BadInputError: If a block changes its input in place.
    """
    saved: dict[str, int] = {}
    originals = {name: block.forward for name, block in blocks.items()}

    def measured(name: str, original: Callable[..., Any], *values: Any, **named: Any) -> Any:
        values = tuple(map(_leaf, values))
        named = {key: _leaf(value) for key, value in named.items()}
        inputs = [value for value in (*values, *named.values()) if isinstance(value, torch.Tensor)]
        inside = KeptBytes((*model.parameters(), *inputs))
        versions = [value._version for value in inputs]
        with torch.enable_grad(), inside.counting():
            output = original(*values, **named)
            saved[name] = inside.bytes_without(output)
        if versions != [value._version for value in inputs]:
            raise BadInputError(
                f"activation checkpointing: '{name}' changes its input in place and can't be computed "
                "twice; choose what lies around it"
            )
        return output

    least = KeptBytes(model.parameters())
    with _tensors_kept(model):
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
    return ModelCost(saved, least.bytes_without())


@contextmanager
def _tensors_kept(model: nn.Module) -> Iterator[None]:
    """A context after which parameters and buffers have their values again, such as a teacher's."""
    # All of them, as BatchNorm's operation doesn't say that it changes some.
    buffers = [buffer.clone() for buffer in model.buffers()]
    with _disable_current_modes():  # of fake tensors, where it is counted with shapes alone
        before = [(parameter, parameter.data) for parameter in model.parameters()]  # the same memory
    changes = _ChangedParameters(model)
    try:
        with changes:
            yield
    finally:
        with _disable_current_modes(), torch.no_grad():
            for parameter, data in before:
                if parameter.data_ptr() != data.data_ptr():
                    parameter.data = data
            for parameter, value in changes.kept:
                parameter.copy_(value)
        for buffer, value in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(value)


class _ChangedParameters(TorchDispatchMode):
    """Copies a parameter before the first operation that changes it: few do, and they may fill the memory.

    Attributes:
        kept: Parameters that were changed, each with its value before.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._unchanged: dict[int, list[nn.Parameter]] = {}
        for parameter in model.parameters():
            self._unchanged.setdefault(_storage(parameter), []).append(parameter)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        for value in tree_leaves((args, named)) if func._schema.is_mutable else ():
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                with _disable_current_modes():
                    found = self._unchanged.pop(_storage(value), ())
                    self.kept += [(parameter, parameter.detach().clone()) for parameter in found]
        return func(*args, **named)


def _leaf(value: Any) -> Any:
    # In training most inputs need a gradient, for which a block keeps more.
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        with torch.enable_grad():  # cloned, as a block may not change a leaf in place
            return value.detach().requires_grad_().clone()
    return value
