"""Fine-tuning: frozen parameters, and LoRA.

LoRA: Hu et al., 2021, https://arxiv.org/abs/2106.09685. A layer's weight W (out, in) is frozen, and the layer
computes with W + alpha / rank · B A, with A (rank, in) random and B (out, rank) zero at first, so that the
first step's outputs are the base model's. Names of the base's parameters stay; A and B are the layer's
parameters `lora_a` and `lora_b`.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.config.model import ALL_LINEAR, ModelConfig
from trainer.distributed.overlap import sharing
from trainer.errors import BadInputError
from trainer.models.activation_checkpointing import blocks
from trainer.models.names import chosen, chosen_parameters, matching

_A, _B = ".lora_a", ".lora_b"
_NO_MATRIX = {
    "Conv1D": "GPT-2's own layer with its matrix transposed, which LoRA doesn't adapt here; train the whole "
    "model, or parts of it by model.freeze",
    "TiedHead": "whose weight is the embedding's: what LoRA adds to one would be missing in the other; leave "
    "it out of model.lora.targets",
}


def fine_tune(model: nn.Module, config: ModelConfig) -> str:
    """Freezes parameters, or adds LoRA, in place, as configured; call it after the weights are loaded.

    Returns:
        A line for the user; "" if all parameters are trained.

    Raises:
        BadInputError: If a pattern matches nothing, or no parameter is left to train.
    """
    if config.lora.rank:
        return _add_lora(model, config)
    if not config.freeze:
        return ""
    frozen, drawn = chosen_parameters(model, config.freeze, "model.freeze"), chosen(config.reinit)
    if both := [name for name in model.state_dict() if frozen(name) and drawn(name)]:
        raise BadInputError(
            f"model.freeze and model.reinit both name '{both[0]}' (of {len(both)}): it would stay as it was "
            "drawn at random; leave it out of one of them"
        )
    _freeze(model, frozen)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise BadInputError(f"model.freeze={list(config.freeze)}: nothing is left to train; freeze less")
    kept = sum(map(keeps_statistics, model.modules()))
    norms = f", and {kept} BatchNorm layers keep their statistics" if kept else ""
    return f"frozen: {', '.join(config.freeze)}; {_trained(model)}{norms}"


def keeps_statistics(module: nn.Module) -> bool:
    """True for a frozen BatchNorm, which stays in evaluation mode in training, too."""
    return isinstance(module, _BatchNorm) and "train" in vars(module)


def like(model: nn.Module, trained: nn.Module) -> None:
    """Applies the freezing and LoRA of a fine-tuned model to another one of the same task, in place."""
    for name, module in trained.named_modules():
        if isinstance(module, _Lora):
            _adapt(model, name, module.lora_a.shape[0], module.lora_scale)
        elif keeps_statistics(module):
            _keep_statistics(model.get_submodule(name))
    learning = {name: parameter.requires_grad for name, parameter in trained.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(learning.get(name, parameter.requires_grad))


def plain_state(model: nn.Module, state: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """Returns the state_dict (or `state`, another one) with LoRA merged: that of the base architecture."""
    scale = next((module.lora_scale for module in model.modules() if isinstance(module, _Lora)), 0.0)
    return merged(model.state_dict() if state is None else state, scale)


def merged(tensors: Mapping[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """Merges LoRA's A and B into the weights; a state_dict without them is returned unchanged.

    Args:
        tensors: Tensors by the names of a state_dict.
        scale: alpha / rank.
    """
    plain = {name: tensor for name, tensor in tensors.items() if not name.endswith((_A, _B))}
    for name, a in tensors.items():
        if name.endswith(_A):
            layer = name.removesuffix(_A)
            weight = next(key for key in (f"{layer}.weight", f"{layer}.in_proj_weight") if key in plain)
            plain[weight] = plain[weight] + scale * (tensors[layer + _B] @ a)
    return plain


# --- freezing ---


def _freeze(model: nn.Module, frozen: Callable[[str], bool]) -> None:
    for name, parameter in model.named_parameters():
        if frozen(name):
            parameter.requires_grad_(False)
    for name, module in model.named_modules():
        own = [f"{name}.{key}" for key, _ in module.named_parameters(recurse=False)]
        if isinstance(module, _BatchNorm) and all(map(frozen, own or [name])):
            _keep_statistics(module)


def _keep_statistics(layer: nn.Module) -> None:
    # A partial, not a closure: deepcopy binds it to the copy.
    layer.train = functools.partial(_stay, layer)  # type: ignore[method-assign]
    layer.eval()


def _stay(layer: nn.Module, mode: bool = True) -> nn.Module:  # noqa: ARG001
    return nn.Module.train(layer, False)


def _trained(model: nn.Module) -> str:
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    every = sum(parameter.numel() for parameter in model.parameters())
    return f"{trained:,} of {every:,} parameters are trained"


# --- LoRA ---


class _Lora(nn.Module):
    lora_a: nn.Parameter
    lora_b: nn.Parameter
    lora_scale: float


class _Linear(nn.Linear, _Lora):
    """Linear layer that computes W x + B (A x), without the sum of the matrices.

    What reads its weight in place of calling it gets the sum, as nn.MultiheadAttention does, and torch's
    kernel for a whole TransformerEncoderLayer in evaluation.
    """

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        return _sum(self, "weight")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = F.linear(F.linear(x, self.lora_a), self.lora_b)
        weight = self._parameters["weight"]
        assert weight is not None
        return F.linear(x, weight, self.bias) + self.lora_scale * low


class _Attention(nn.MultiheadAttention, _Lora):
    """Attention whose queries, keys and values have one matrix, which torch's kernels take as a whole."""

    @property
    def in_proj_weight(self) -> torch.Tensor:  # type: ignore[override]
        return _sum(self, "in_proj_weight")


def _sum(layer: _Lora, name: str) -> torch.Tensor:
    weight = layer._parameters[name]
    assert weight is not None
    if hasattr(weight, "placements"):  # a rank's rows, which FSDP reads to keep them
        return weight
    return weight + layer.lora_scale * (layer.lora_b @ layer.lora_a)


def _add_lora(model: nn.Module, config: ModelConfig) -> str:
    targets = _targets(model, config.lora.targets)
    fresh = chosen(config.reinit)  # not of the base model: a new head is trained as a whole
    _freeze(model, lambda name: not fresh(name))
    for name in targets:
        _adapt(model, name, config.lora.rank, config.lora.alpha / config.lora.rank)
    return f"LoRA of rank {config.lora.rank} on {len(targets)} layers; {_trained(model)}"


def _targets(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    possible = [name for name, module in model.named_modules() if name and _matrix(module)]
    inside = tuple(f"{name}." for name in blocks(model))
    found = [name for name in possible if name.startswith(inside)]
    if patterns and tuple(patterns) != (ALL_LINEAR,):
        _check_named(model, patterns)
        found = matching(possible, patterns, "model.lora.targets")
    if not found:
        _check_named(model, [f"{name}*" for name in inside])
        raise BadInputError(
            "model.lora: the model has no blocks with linear layers or attention, as a GPT or a ViT has; "
            "use model.freeze, or name linear layers by model.lora.targets"
        )
    return found


def _check_named(model: nn.Module, patterns: Sequence[str]) -> None:
    """Rejects layers that look like linear ones and that LoRA can't adapt."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind not in _NO_MATRIX or not any(fnmatchcase(name, pattern) for pattern in patterns):
            continue
        raise BadInputError(f"model.lora: '{name}' is a {kind}, {_NO_MATRIX[kind]}")


def _matrix(module: nn.Module) -> str:
    """Returns the name of the matrix that LoRA can adapt; "" if there is none."""
    names: dict[type[nn.Module], str] = {nn.Linear: "weight", nn.MultiheadAttention: "in_proj_weight"}
    # Not of a subclass with another forward, which would be replaced.
    name = next((name for kind, name in names.items() if type(module).forward is kind.forward), "")
    return name if module._parameters.get(name) is not None else ""


def _adapt(model: nn.Module, name: str, rank: int, scale: float) -> None:
    """Adds A and B to a layer, in place."""
    layer = model.get_submodule(name)
    weight = layer._parameters[_matrix(layer)]
    assert weight is not None
    own = f"{name}.{_matrix(layer)}"
    for same in sharing(dict(model.named_parameters(remove_duplicate=False))):
        if own in same:
            raise BadInputError(
                f"model.lora.targets: {same[0]} and {same[1]} are one weight; leave {name} out"
            )
    a, b = weight.new_empty(rank, weight.shape[1]), weight.new_zeros(weight.shape[0], rank)
    if not a.is_meta:
        nn.init.kaiming_uniform_(a, math.sqrt(5))  # as the authors' code does, and torch with linear layers
    layer.register_parameter("lora_a", nn.Parameter(a))
    layer.register_parameter("lora_b", nn.Parameter(b))
    kind: type[_Lora] = _Attention if isinstance(layer, nn.MultiheadAttention) else _Linear
    layer.__class__ = kind
    layer.lora_scale = scale  # type: ignore[assignment]
