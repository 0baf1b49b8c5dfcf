"""Stochastic depth: residual branches are dropped at random in training (Huang et al., 2016)."""

import functools
from typing import Any

import torch
from torch import nn

from trainer.errors import BadInputError
from trainer.models.activation_checkpointing import blocks

# Last submodule of each residual branch, by class name of the block: the trainer's and torchvision's.
_BRANCHES = {
    "ResidualBlock": ("conv2",),
    "BasicBlock": ("bn2",),
    "Bottleneck": ("bn3",),
    "ResBottleneckBlock": ("f",),
    "EncoderBlock": ("dropout", "mlp"),
}
# torchvision's layer, in models that have stochastic depth already: its probability `p` is scaled.
_LAYER = "StochasticDepth"


def add_stochastic_depth(model: nn.Module, probability: float) -> None:
    """Makes each block drop its residual branches per sample, in place; names of parameters don't change.

    The probability rises linearly with depth up to its value at the last block, as in the paper. In a model
    with StochasticDepth layers, their probabilities are scaled, the largest to `probability`. A kept branch
    is divided by the probability of keeping it.

    Args:
        model: The model.
        probability: Probability of dropping a branch of the last block, in [0, 1).

    Raises:
        BadInputError: If the model has no known residual blocks.
    """
    own = [module for module in model.modules() if type(module).__name__ == _LAYER]
    if own:
        most = max(float(module.p) for module in own)  # type: ignore[arg-type]
        for number, module in enumerate(own, 1):
            fraction = float(module.p) / most if most else number / len(own)  # type: ignore[arg-type]
            module.p = probability * fraction  # type: ignore[assignment]
        return
    known = [block for block in blocks(model).values() if type(block).__name__ in _BRANCHES]
    if not known:
        raise BadInputError(
            "regularization.stochastic_depth: no residual blocks that it knows are in this model "
            "(small_resnet, torchvision's resnet, regnet, vit, convnext, efficientnet, swin); use 0"
        )
    for number, block in enumerate(known, 1):
        for end in _BRANCHES[type(block).__name__]:
            drop = functools.partial(_drop_branch, probability * number / len(known))
            block.get_submodule(end).register_forward_hook(drop)


def _drop_branch(probability: float, module: nn.Module, _inputs: Any, branch: torch.Tensor) -> torch.Tensor:
    """Forward hook of a branch's last module: sets samples of its output (samples, …) to 0 in training."""
    if not module.training:
        return branch
    # One random number per sample, from the generator that is keyed by the micro-batch.
    shape = (branch.shape[0], *[1] * (branch.ndim - 1))
    kept = torch.rand(shape, device=branch.device) >= probability
    return branch * (kept / (1 - probability)).to(branch.dtype)
