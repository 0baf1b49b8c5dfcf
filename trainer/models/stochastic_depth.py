"""Stochastic depth: in training, whole residual branches are left out at random (Huang et al., 2016)."""

import functools
from typing import Any

import torch
from torch import nn

from trainer.errors import BadInputError
from trainer.models.activation_checkpointing import blocks

# Where the residual branches of a block end, by the name of its class: ours, and torchvision's.
_BRANCHES = {
    "ResidualBlock": ("conv2",),
    "BasicBlock": ("bn2",),
    "Bottleneck": ("bn3",),
    "ResBottleneckBlock": ("f",),
    "EncoderBlock": ("dropout", "mlp"),
}
# torchvision's, with branches that are dropped already: only the largest probability is set.
_OWN = "StochasticDepth"


def add_stochastic_depth(model: nn.Module, probability: float) -> None:
    """Lets each block drop its branches, sample by sample, in place; names stay as they are.

    The probability rises linearly with depth, from nearly 0 to its value at the last block, as in the
    paper; where a model brings probabilities of its own, in their proportions. A branch
    that is kept is divided by the probability of that.

    Raises:
        BadInputError: If it isn't known where the model's branches end.
    """
    own = [module for module in model.modules() if type(module).__name__ == _OWN]
    if own:
        most = max(float(module.p) for module in own)  # type: ignore[arg-type]
        for number, module in enumerate(own, 1):
            share = float(module.p) / most if most else number / len(own)  # type: ignore[arg-type]
            module.p = probability * share  # type: ignore[assignment]
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
    if not module.training:
        return branch
    # One number for each sample, from the generator that is keyed by the micro-batch.
    shape = (branch.shape[0], *[1] * (branch.ndim - 1))
    kept = torch.rand(shape, device=branch.device) >= probability
    return branch * (kept / (1 - probability)).to(branch.dtype)
