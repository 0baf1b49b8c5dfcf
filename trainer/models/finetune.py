"""Fine-tuning: frozen parameters, LoRA, and what is trained as a whole beside it.

LoRA: Hu et al., 2021, https://arxiv.org/abs/2106.09685. A layer's weight W (out, in) is frozen, and the layer
computes with W + alpha / rank · B A, with A (rank, in) random and B (out, rank) zero at first, so that the
first step's outputs are the base model's. Names of the base's parameters stay; A and B are the layer's
parameters `lora_a` and `lora_b`.
"""

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.config.model import ALL_LINEAR, ModelConfig
from trainer.distributed.overlap import sharing
from trainer.errors import BadInputError
from trainer.models.activation_checkpointing import blocks
from trainer.models.names import as_endings, chosen, chosen_parameters, matching

_A, _B = ".lora_a", ".lora_b"
_NO_MATRIX = {
    "Conv1D": "GPT-2's own layer with its matrix transposed, which LoRA doesn't adapt here; train the whole "
    "model, or parts of it by model.freeze",
    "TiedHead": "whose weight is the embedding's: what LoRA adds to one would be missing in the other; leave "
    "it out, or train the embedding by model.lora.modules_to_save",
}
_SAVED = "model.lora.modules_to_save"


def fine_tune(model: nn.Module, config: ModelConfig) -> str:
    """Freezes parameters, or adds LoRA, in place, as configured; call it after the weights are loaded.

    Returns:
        A line for the user; "" if all parameters are trained.

    Raises:
        BadInputError: If a pattern matches nothing, or no parameter is left to train.
    """
    held = hold_frozen(model, config)
    if config.lora.rank:
        return _add_lora(model, config) + held
    if not config.freeze:
        return ""
    frozen, drawn = _frozen(model, config), chosen(config.reinit)
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
    return f"frozen: {', '.join(config.freeze)}; {_trained(model)}{norms}{held}"


def hold_frozen(model: nn.Module, config: ModelConfig) -> str:
    """Holds what won't be trained as model.frozen_dtype says, in place: matrices that autocast rounds anyway.

    It may be called before the weights are loaded, which then never take the memory of float32.

    Returns:
        The end of a line for the user.
    """
    if config.frozen_dtype == "fp32":
        return ""
    frozen, fit, unfit = _frozen(model, config), list[tuple[int, nn.Module]](), set[int]()
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            plain = type(module).forward in (nn.Linear.forward, nn.Embedding.forward, _Embedding.forward)
            known = plain and getattr(module, "max_norm", None) is None  # else the embedding writes to it
            if key == "weight" and known and frozen(f"{name}.{key}"):
                fit.append((id(parameter), module))
            else:
                unfit.add(id(parameter))
    held = {number: module for number, module in fit if number not in unfit}
    for module in [module for number, module in fit if number in held]:
        _hold(module)
    size = sum(module.get_parameter("weight").nbytes for module in held.values())
    return f"; {len(held)} frozen matrices held in bfloat16, {size / 1e6:,.1f} MB"


def keeps_statistics(module: nn.Module) -> bool:
    """True for a frozen BatchNorm, which stays in evaluation mode in training, too."""
    return isinstance(module, _BatchNorm) and "train" in vars(module)


def like(model: nn.Module, trained: nn.Module) -> None:
    """Applies the freezing and LoRA of a fine-tuned model to another one of the same task, in place.

    Its numbers stay float32: it is called without autocast.
    """
    for name, module in trained.named_modules():
        if isinstance(module, _Lora):
            a = module.lora_a
            _adapt(model, name, a.shape[0], module.lora_scale, module.lora_dropout, a.dtype)
        elif keeps_statistics(module):
            _keep_statistics(model.get_submodule(name))
    learning = {name: parameter.requires_grad for name, parameter in trained.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(learning.get(name, parameter.requires_grad))


def plain_state(model: nn.Module, state: Mapping[str, torch.Tensor] | None = None) -> dict[str, Any]:
    """Returns the state_dict (or `state`, another one) of the base architecture: LoRA merged, float32 again.

    What is merged is so when it is sliced: one tensor at a time takes memory.
    """
    scale = next((module.lora_scale for module in model.modules() if isinstance(module, _Lora)), 0.0)
    plain = _merged(model.state_dict() if state is None else state, scale)
    held = [f"{name}.weight" for name, module in model.named_modules() if getattr(module, "held", False)]
    bare = [name for name in held if isinstance(plain[name], torch.Tensor)]
    return {**plain, **{name: _Sum(plain[name], torch.float32) for name in bare}}


def merged(tensors: Mapping[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """Merges LoRA's A and B into the weights; a state_dict without them is returned unchanged.

    Args:
        tensors: Tensors by the names of a state_dict.
        scale: alpha / rank.
    """
    return {name: one[...] if isinstance(one, _Sum) else one for name, one in _merged(tensors, scale).items()}


class _Sum:
    """A weight, and LoRA's product of b and a, which are added when it is sliced."""

    layout = torch.strided

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype, *product: Any) -> None:
        self.weight, self.dtype, self.product = weight, dtype, product
        self.shape, self.numel = weight.shape, weight.numel

    def __getitem__(self, rows: Any) -> torch.Tensor:
        whole = self.weight.to(self.dtype)
        if self.product:
            scale, b, a = self.product
            whole = whole + scale * (b @ a)
        return whole[rows]


def _merged(tensors: Mapping[str, torch.Tensor], scale: float) -> dict[str, Any]:
    plain: dict[str, Any] = {name: one for name, one in tensors.items() if not name.endswith((_A, _B))}
    for name, a in tensors.items():
        if name.endswith(_A):
            layer = name.removesuffix(_A)
            weight = next(key for key in (f"{layer}.weight", f"{layer}.in_proj_weight") if key in plain)
            dtype = torch.promote_types(plain[weight].dtype, a.dtype)
            plain[weight] = _Sum(plain[weight], dtype, scale, tensors[layer + _B], a)
    return plain


# --- freezing ---


def _frozen(model: nn.Module, config: ModelConfig) -> Callable[[str], bool]:
    """Returns a function that is true for the names of parameters that aren't trained."""
    if not config.lora.rank:
        return chosen_parameters(model, config.freeze, "model.freeze")
    fresh = chosen(config.reinit)  # not of the base model: a new head is trained as a whole
    saved = chosen_parameters(model, saved_modules(model, config.lora.modules_to_save), _SAVED)
    return lambda name: not (fresh(name) or saved(name))


def saved_modules(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Names the modules that model.lora.modules_to_save trains as a whole, the outermost ones.

    Raises:
        BadInputError: If a pattern matches nothing that has parameters.
    """
    names = [
        name for name, module in model.named_modules() if name and any(True for _ in module.parameters())
    ]
    _check_named(model, patterns, _SAVED, ("TiedHead",))
    found = matching(names, as_endings(patterns, names), _SAVED)
    return [name for name in found if not any(name.startswith(f"{other}.") for other in found)]


class _Embedding(nn.Embedding):
    """Embedding whose numbers are bfloat16, and which gives float32."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens).float()


def _hold(module: nn.Module) -> None:
    weight = module._parameters["weight"]
    assert weight is not None
    weight.data = weight.data.to(torch.bfloat16)
    module.held = True  # type: ignore[assignment]
    if isinstance(module, nn.Embedding):
        module.__class__ = _Embedding


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
    lora_dropout: float


class _Linear(nn.Linear, _Lora):
    """Linear layer that computes W x + B (A x), without the sum of the matrices.

    What reads its weight in place of calling it gets the sum, as nn.MultiheadAttention does, and torch's
    kernel for a whole TransformerEncoderLayer in evaluation.
    """

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        return _sum(self, "weight")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self._parameters["weight"]
        assert weight is not None
        dropped = F.dropout(x, self.lora_dropout) if self.lora_dropout and self.training else x
        low = F.linear(F.linear(dropped, self.lora_a), self.lora_b)
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


def adapted(model: nn.Module) -> list[str]:
    """Names the layers with LoRA."""
    return [name for name, module in model.named_modules() if isinstance(module, _Lora)]


def _add_lora(model: nn.Module, config: ModelConfig) -> str:
    lora = config.lora
    saved = saved_modules(model, lora.modules_to_save)
    targets = _targets(model, lora.targets, saved)
    _freeze(model, _frozen(model, config))
    dtype = torch.float32 if config.frozen_dtype == "bf16" else None
    for name in targets:
        _adapt(model, name, lora.rank, lora.alpha / lora.rank, lora.dropout, dtype)
    words = [f"LoRA of rank {lora.rank} on {len(targets)} layers"]
    words += [f"dropout {lora.dropout:g}"] if lora.dropout else []
    words += [f"as a whole: {', '.join(saved)}"] if saved else []
    return "; ".join([*words, _trained(model)])


def _targets(model: nn.Module, patterns: Sequence[str], saved: Sequence[str]) -> list[str]:
    modules = {name: module for name, module in model.named_modules() if name}
    possible = [name for name, module in modules.items() if _matrix(module)]
    whole, inside = chosen(saved), tuple(f"{name}." for name in blocks(model))
    every = not patterns or ALL_LINEAR in patterns
    found = {name for name in possible if every and name.startswith(inside) and not whole(name)}
    if not found and every:
        _check_named(model, [f"{name}*" for name in inside])
        raise BadInputError(
            "model.lora: the model has no blocks with linear layers or attention, as a GPT or a ViT has; "
            "use model.freeze, or name linear layers by model.lora.targets"
        )
    for given in (pattern for pattern in patterns if pattern != ALL_LINEAR):
        (pattern,) = as_endings([given], modules)
        _check_named(model, [pattern])
        named = [name for name in modules if fnmatchcase(name, pattern)]
        able = [name for name in named if name in possible]
        if named and not able:
            kind = type(modules[named[0]]).__name__
            raise BadInputError(
                f"model.lora.targets: '{named[0]}' is a {kind}, and LoRA adapts linear layers and torch's "
                f"attention; {_SAVED} trains it as a whole"
            )
        if both := next(filter(whole, able), None):
            raise BadInputError(
                f"model.lora.targets and {_SAVED} both name '{both}'; leave it out of one of them"
            )
        found.update(matching(possible, [pattern], "model.lora.targets"))
    return [name for name in possible if name in found]


def _check_named(
    model: nn.Module,
    patterns: Sequence[str],
    key: str = "model.lora",
    kinds: Collection[str] = tuple(_NO_MATRIX),
) -> None:
    """Rejects layers that look like linear ones and that LoRA can't adapt."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in kinds and any(fnmatchcase(name, pattern) for pattern in as_endings(patterns, [name])):
            raise BadInputError(f"{key}: '{name}' is a {kind}, {_NO_MATRIX[kind]}")


def _matrix(module: nn.Module) -> str:
    """Returns the name of the matrix that LoRA can adapt; "" if there is none."""
    names: dict[type[nn.Module], str] = {nn.Linear: "weight", nn.MultiheadAttention: "in_proj_weight"}
    # Not of a subclass with another forward, which would be replaced.
    name = next((name for kind, name in names.items() if type(module).forward is kind.forward), "")
    return name if module._parameters.get(name) is not None else ""


def _adapt(
    model: nn.Module, name: str, rank: int, scale: float, dropout: float, dtype: torch.dtype | None
) -> None:
    """Adds A and B to a layer, in place; `dtype`: theirs; None: the weight's."""
    layer = model.get_submodule(name)
    weight = layer._parameters[_matrix(layer)]
    assert weight is not None
    own = f"{name}.{_matrix(layer)}"
    for same in sharing(dict(model.named_parameters(remove_duplicate=False))):
        if own in same:
            raise BadInputError(
                f"model.lora.targets: {same[0]} and {same[1]} are one weight; leave {name} out"
            )
    kind: type[_Lora] = _Attention if isinstance(layer, nn.MultiheadAttention) else _Linear
    if dropout and (kind is _Attention or name in getattr(model, "read", ())):
        raise BadInputError(
            f"model.lora.dropout: the weight of '{name}' is read, with LoRA's product in it, so that nothing "
            "is there to drop; leave that layer out of model.lora.targets, or dropout"
        )
    a = weight.new_empty(rank, weight.shape[1], dtype=dtype)
    b = weight.new_zeros(weight.shape[0], rank, dtype=dtype)
    if not a.is_meta:
        nn.init.kaiming_uniform_(a, math.sqrt(5))  # as the authors' code does, and torch with linear layers
    layer.register_parameter("lora_a", nn.Parameter(a))
    layer.register_parameter("lora_b", nn.Parameter(b))
    layer.__class__ = kind
    layer.lora_scale, layer.lora_dropout = scale, dropout  # type: ignore[assignment]
