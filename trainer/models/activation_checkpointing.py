"""Activation checkpointing: activations inside a block are recomputed in backward instead of kept."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer.config.model import MemoryConfig
from trainer.errors import BadInputError
from trainer.models.buffers import TensorSlot
from trainer.models.names import matching

_CONTAINERS = (nn.Sequential, nn.ModuleList)


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Returns a model's repeated blocks by name: members of a Sequential or ModuleList with children.

    For torchvision's ResNets these are the residual blocks, for a transformer its layers.
    """
    return dict(_blocks(model, ""))


def _blocks(model: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    for name, child in model.named_children():
        is_member = isinstance(model, _CONTAINERS) and any(True for _ in child.children())
        inside = _blocks(child, f"{prefix}{name}.") if isinstance(child, _CONTAINERS) or not is_member else []
        found.extend(inside or ([(prefix + name, child)] if is_member else []))
    return found


def candidates(config: MemoryConfig, model: nn.Module) -> tuple[dict[str, nn.Module], list[str]]:
    """Returns the modules that may be checkpointed, by name, and the names of the chosen ones.

    Raises:
        BadInputError: If there are none, or a name can't be checkpointed.
    """
    if config.checkpointing == "none":
        return {}, []
    if config.checkpointing == "names":
        modules = {name: module for name, module in model.named_modules() if name}
        chosen = matching(modules, config.names, "memory.names")
        # "layer4.*" means layer4.0 alone, not the modules inside it as well.
        outermost = [n for n in chosen if not any(n.startswith(f"{other}.") for other in chosen)]
        for name in outermost:
            refuse_a_list(name, modules[name], "memory.names")
        return {name: modules[name] for name in outermost}, outermost
    found = blocks(model)
    if not found:
        raise BadInputError(
            f"memory.checkpointing={config.checkpointing}: the model has no repeated blocks "
            "(members of a Sequential or ModuleList); use none, or names with memory.names"
        )
    return found, list(found)[:: config.every]


def refuse_a_list(name: str, module: nn.Module, key: str) -> None:
    """Raises BadInputError for a module without a forward: a list or dictionary of modules."""
    if type(module).forward is nn.Module.forward:
        raise BadInputError(f"{key}: '{name}' is a list of modules; use '{name}.*'")


def recompute(module: nn.Module, changing: Sequence[TensorSlot] = ()) -> None:
    """Checkpoints a module, in place; parameter names stay.

    Args:
        module: The module.
        changing: Its tensors that a forward pass reads and changes: backward repeats the pass from the same
            values, and leaves those that it changes alone.
    """
    module.forward = functools.partial(_recomputed, module.forward, changing)


def _recomputed(
    forward: Callable[..., Any], changing: Sequence[TensorSlot], *values: Any, **named: Any
) -> Any:
    # Lists are copied: torchvision's densenet appends to them before the block is recomputed.
    # Non-reentrant, as torch.utils.checkpoint advises: works with DDP, no_sync and torch.compile.
    copies = (list(value) if isinstance(value, list) else value for value in values)
    if changing and torch.is_grad_enabled():
        before = [_clone(slot.tensors[slot.key]) for slot in changing]
        named["context_fn"] = lambda: (nullcontext(), _as_before(changing, before))
    return checkpoint(forward, *copies, use_reentrant=False, **named)


@contextmanager
def _as_before(changing: Sequence[TensorSlot], before: list[torch.Tensor]) -> Iterator[None]:
    now = [slot.tensors[slot.key] for slot in changing]
    for slot, tensor in zip(changing, before, strict=True):
        slot.tensors[slot.key] = _clone(tensor)
    try:
        yield
    finally:
        for slot, other in zip(changing, now, strict=True):
            slot.tensors[slot.key] = other


def _clone(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.detach().clone()
