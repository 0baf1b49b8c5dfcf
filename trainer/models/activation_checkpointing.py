"""Activation checkpointing: activations inside a block are recomputed in backward instead of kept."""

import functools
from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field, model_validator
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer.config.recipe_file import Section
from trainer.errors import BadInputError
from trainer.host.allocator import Allocator
from trainer.models.names import matching

_CONTAINERS = (nn.Sequential, nn.ModuleList)


class MemoryConfig(Section):
    """What is traded for memory."""

    checkpointing: Literal["none", "blocks", "names", "budget"] = Field(
        "none",
        description="activation checkpointing (Chen et al., 2016): none, blocks (every n-th, see every), "
        "names (modules by name), budget (the cheapest blocks that keep activations within budget_gib)",
    )
    every: int = Field(1, ge=1, description="checkpoint every n-th block (blocks)")
    names: tuple[str, ...] = Field((), description='modules to checkpoint, such as ["blocks.0", "layer4.*"]')
    budget_gib: float | None = Field(
        None, gt=0, le=1e6, description="GiB that the activations of one micro-batch may take (budget)"
    )
    allocator: Allocator = Field(
        "native",
        description="who hands out GPU memory: native (PyTorch's), expandable (PyTorch's with segments that "
        "grow: less is lost in pieces where sizes vary), async (CUDA's own, driver 470 on), managed (unified "
        "memory through RMM, for what is larger than the card; driver 525 on, slower)",
    )
    empty_cache: Literal["never", "after_eval"] = Field(
        "never",
        description="give a GPU's cached memory back after each evaluation, whose batches have other sizes; "
        "the log says what that freed and cost",
    )
    history: bool = Field(
        False, description="record who allocates GPU memory, for memory_snapshot.pickle when it runs out"
    )

    @model_validator(mode="after")
    def _what_the_choice_needs(self) -> "MemoryConfig":
        if (self.checkpointing == "names") != bool(self.names):
            raise ValueError("memory.checkpointing=names and memory.names=[…] belong together")
        if (self.checkpointing == "budget") != (self.budget_gib is not None):
            raise ValueError("memory.checkpointing=budget and memory.budget_gib=… belong together")
        if self.history and self.allocator in ("async", "managed"):
            raise ValueError(
                f"memory.history is PyTorch's own allocator's: not with memory.allocator={self.allocator}"
            )
        if self.every > 1 and self.checkpointing != "blocks":
            raise ValueError("memory.every needs memory.checkpointing=blocks")
        return self


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated parts of a model, by name: members of a Sequential or ModuleList that have parts.

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
    """Modules that may be checkpointed, by name, and the names of those that are.

    With a budget the choice is still to be made.

    Raises:
        BadInputError: If there are none, or a name is of no use.
    """
    if config.checkpointing == "none":
        return {}, []
    if config.checkpointing == "names":
        modules = {name: module for name, module in model.named_modules() if name}
        chosen = matching(modules, config.names, "memory.names")
        # "layer4.*" means layer4.0, not all that lies below it as well.
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
    """Raises BadInputError for a module that nobody calls: a list or dictionary of others."""
    if type(module).forward is nn.Module.forward:
        raise BadInputError(f"{key}: '{name}' is a list of modules; use '{name}.*'")


def recompute(module: nn.Module) -> None:
    """Checkpoints a module, in place; names of parameters stay as they are."""
    module.forward = functools.partial(_recomputed, module.forward)


def _recomputed(forward: Callable[..., Any], *values: Any, **named: Any) -> Any:
    # A list is copied: torchvision's densenet appends to it before the block is computed again.
    # Non-reentrant: works with DDP, no_sync and torch.compile (torch.utils.checkpoint's advice).
    copies = (list(value) if isinstance(value, list) else value for value in values)
    return checkpoint(forward, *copies, use_reentrant=False, **named)
