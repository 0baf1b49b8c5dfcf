"""Number formats: what autocast computes in, and the loss scale that fp16 needs."""

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from trainer.config.model import PrecisionConfig
from trainer.errors import BadInputError
from trainer.models.activation_checkpointing import refuse_a_list
from trainer.models.names import matching


def set_matmul_mode(config: PrecisionConfig) -> None:
    """Lets float32 products on the GPU round to TensorFloat-32, or not.

    Both switches are set either way: cuDNN's is on by default, so that plain fp32 would not be fp32.
    """
    tf32 = config.mode == "tf32"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32


def check_precision(config: PrecisionConfig, device: torch.device) -> None:
    """Refuses what the device can't do.

    Raises:
        BadInputError: tf32 on a CPU or on a GPU before Ampere, bf16 on a GPU before Ampere.
    """
    if config.mode == "tf32" and device.type != "cuda":
        raise BadInputError("precision.mode=tf32 needs an NVIDIA GPU; on the CPU use fp32 or bf16")
    if device.type == "cuda" and config.mode in ("tf32", "bf16"):
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            raise BadInputError(
                f"precision.mode={config.mode} needs Ampere or newer (this is sm_{major}{minor}); use fp16"
            )


def autocast(config: PrecisionConfig, device: torch.device) -> AbstractContextManager[object]:
    """The context of a forward pass; it may be entered again and again."""
    if config.mode in ("fp32", "tf32"):
        return nullcontext()
    dtype = torch.float16 if config.mode == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype)


def fp32_modules(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """The modules that `precision.keep_fp32` names, by name (see `names.matching`).

    Raises:
        BadInputError: If a pattern matches none, or one that nobody calls.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    names = matching(modules, patterns, "precision.keep_fp32")
    for name in names:
        refuse_a_list(name, modules[name], "precision.keep_fp32")
        if isinstance(modules.get(name.rpartition(".")[0]), nn.MultiheadAttention):
            raise BadInputError(
                f"precision.keep_fp32: '{name}' is only read by the attention around it; name that"
            )
    return {name: modules[name] for name in names}


def keep_in_fp32(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Lets modules compute in float32 whatever autocast says, in place; names stay as they are."""
    for module in modules:
        module.forward = functools.partial(_in_fp32, module.forward, device.type)


def _in_fp32(forward: Callable[..., Any], device_type: str, *values: Any, **named: Any) -> Any:
    with torch.autocast(device_type, enabled=False):
        return forward(*map(_float32, values), **{name: _float32(value) for name, value in named.items()})


def _float32(value: Any) -> Any:
    # Only what autocast made: integers are indices, and float64 is somebody's choice.
    low = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if low else value


def make_scaler(config: PrecisionConfig, device: torch.device) -> GradScaler | None:
    """The loss scaler of fp16, None for formats that need none (Micikevicius et al., 2018)."""
    if config.mode != "fp16":
        return None
    return GradScaler(device.type, init_scale=config.initial_scale, growth_interval=config.growth_interval)


def found_inf(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """1.0 if the gradients of this step overflowed, else 0.0; float32 () on their device, unread.

    There is no public name for it. Reading the scale before and after instead would miss a scale that
    can't shrink, and cost a copy.
    """
    found: torch.Tensor
    (found,) = scaler._found_inf_per_device(optimizer).values()
    return found


def scale_of(scaler: GradScaler) -> torch.Tensor:
    """The loss scale, float32 () on its device; the public get_scale would wait for it."""
    scale = scaler._get_scale_async()
    assert scale is not None  # it exists once a loss has been scaled
    return scale
