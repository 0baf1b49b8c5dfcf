"""Folding of BatchNorm into the layer before it: in evaluation both are one affine map (Jacob et al., 2018).

torch computes the folded weights; this module finds the layers that may be folded.
torch.fx.experimental.optimization.fuse knows convolutions alone, and raises if a model can't be traced.
"""

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

# Exactly these classes, as a subclass may compute something else; with the dimensions of their output.
_LAYERS = {nn.Conv1d: 3, nn.Conv2d: 4, nn.Conv3d: 5, nn.Linear: 2}
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class Folded(NamedTuple):
    """Result of `fold_batchnorm`.

    Attributes:
        model: Copy with an Identity in place of each folded BatchNorm, so that names stay.
        names: Names of the folded BatchNorms.
        kept: Number of the others.
        why: Reason why the model couldn't be traced; "" if it was.
    """

    model: nn.Module
    names: tuple[str, ...]
    kept: int
    why: str = ""


def fold_batchnorm(model: nn.Module, inputs: Sequence[torch.Tensor]) -> Folded:
    """Folds each BatchNorm that directly follows a convolution or linear layer whose output it alone takes.

    The data flow is traced by torch.fx; a model that it can't trace stays unchanged.

    Args:
        model: In evaluation mode; not modified.
        inputs: Example inputs, for the shapes.
    """
    model = copy.deepcopy(model)
    if not _norms_in(model):
        return Folded(model, (), 0)
    try:
        traced = fx.symbolic_trace(model)
        ShapeProp(traced).propagate(*inputs)
    except Exception as error:  # from the model's own Python, called with proxies instead of tensors
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        return Folded(model, (), _norms_in(model), f"stays: torch.fx can't trace the model ({why})")
    modules = dict(model.named_modules(remove_duplicate=False))
    uses = Counter(id(modules[str(node.target)]) for node in traced.graph.nodes if node.op == "call_module")
    read = [str(node.target) for node in traced.graph.nodes if node.op == "get_attr"]
    names = []
    for node in traced.graph.nodes:
        if (found := _pair(node, modules)) is None:
            continue
        layer, norm = found
        alone = uses[id(modules[layer])] == uses[id(modules[norm])] == 1
        if not alone or any(name.startswith((f"{layer}.", f"{norm}.")) for name in read):
            continue
        _replace(model, layer, _folded(modules[layer], modules[norm]))
        _replace(model, norm, nn.Identity())
        names.append(norm)
    return Folded(model, tuple(names), _norms_in(model))


def _pair(node: fx.Node, modules: dict[str, nn.Module]) -> tuple[str, str] | None:
    """Returns the names of the layer and the BatchNorm of a node, if these two may be folded."""
    if node.op != "call_module" or len(node.all_input_nodes) != 1:
        return None
    before = node.all_input_nodes[0]
    if before.op != "call_module" or len(before.users) != 1:
        return None
    layer, norm = modules[str(before.target)], modules[str(node.target)]
    if type(layer) not in _LAYERS or type(norm) not in _NORMS or norm.training:
        return None
    if norm.running_mean is None or norm.running_var is None:
        return None
    if any("forward" in vars(one) or any(getattr(one, kind) for kind in _HOOKS) for one in (layer, norm)):
        return None
    # (n, length, channels) from a linear layer would be normalized over the length.
    shape = getattr(before.meta.get("tensor_meta"), "shape", ())
    return (str(before.target), str(node.target)) if len(shape) == _LAYERS[type(layer)] else None


def _folded(layer: nn.Conv2d, norm: nn.BatchNorm2d) -> nn.Module:
    """Folds two layers into one, of any number of dimensions; in float64, rounded once."""
    exact = copy.deepcopy(norm).double()
    if not exact.affine:  # torch can't fold it into a linear layer
        like = exact.get_buffer("running_var")
        exact.weight, exact.bias = nn.Parameter(torch.ones_like(like)), nn.Parameter(torch.zeros_like(like))
    fuse = fuse_linear_bn_eval if isinstance(layer, nn.Linear) else fuse_conv_bn_eval
    made: nn.Module = fuse(copy.deepcopy(layer).double(), exact)
    return made.to(layer.weight.dtype).requires_grad_(False)


def _replace(model: nn.Module, name: str, module: Any) -> None:
    above, _, last = name.rpartition(".")
    setattr(model.get_submodule(above), last, module)


def _norms_in(model: nn.Module) -> int:
    return sum(isinstance(module, _NORMS) for module in model.modules())
