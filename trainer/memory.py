"""Activation checkpointing: activations inside a block are recomputed in backward instead of kept."""

import functools
import resource
from typing import Literal

import torch
from pydantic import Field
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer.config import Section
from trainer.errors import BadInputError

_CONTAINERS = (nn.Sequential, nn.ModuleList)


class MemoryConfig(Section):
    """What is traded for memory."""

    checkpointing: Literal["none", "blocks"] = Field(
        "none", description="activation checkpointing: none, or of every block (Chen et al., 2016)"
    )


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated parts of a model: members of a Sequential or ModuleList that have parts themselves.

    For torchvision's ResNets these are the residual blocks, for a transformer its layers.
    """
    found: list[nn.Module] = []
    for child in model.children():
        is_member = isinstance(model, _CONTAINERS) and any(True for _ in child.children())
        inside = blocks(child) if isinstance(child, _CONTAINERS) or not is_member else []
        found.extend(inside or ([child] if is_member else []))
    return found


def checkpoint_blocks(model: nn.Module) -> int:
    """Checkpoints every block, in place; names of parameters stay as they are.

    Returns:
        How many blocks there are.

    Raises:
        BadInputError: If the model has none.
    """
    found = blocks(model)
    if not found:
        raise BadInputError(
            "memory.checkpointing=blocks: the model has no repeated blocks "
            "(members of a Sequential or ModuleList); use none"
        )
    for block in found:
        # Non-reentrant: works with DDP, no_sync and torch.compile (torch.utils.checkpoint's advice).
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return len(found)


def used_memory(device: torch.device) -> int:
    """Peak bytes allocated on a GPU; on the CPU the process's resident bytes now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        with open("/proc/self/statm") as file:  # noqa: PTH123 (pathlib would cost more than the read)
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:  # macOS: the peak, in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
