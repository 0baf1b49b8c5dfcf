"""Mixed precision: autocast, and the loss scale of fp16."""

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import distributed as dist, nn
from torch.amp.grad_scaler import GradScaler

from trainer.config.model import PrecisionConfig
from trainer.errors import BadInputError
from trainer.models.activation_checkpointing import refuse_a_list
from trainer.models.names import matching


def set_matmul_mode(config: PrecisionConfig) -> None:
    """Allows or forbids TensorFloat-32 in float32 products on the GPU.

    Both switches are always set: cuDNN's is on by default, so that fp32 would not be fp32.
    """
    tf32 = config.mode == "tf32"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32


def check_precision(config: PrecisionConfig, device: torch.device) -> None:
    """Rejects a precision that the device doesn't support.

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
    """Returns the autocast context of a forward pass; it may be entered repeatedly."""
    if config.mode in ("fp32", "tf32"):
        return nullcontext()
    dtype = torch.float16 if config.mode == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype)


def fp32_modules(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Returns the modules of `precision.keep_fp32` by name (see `names.matching`).

    Raises:
        BadInputError: If a pattern matches no module, or one without a forward.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    names = matching(modules, patterns, "precision.keep_fp32")
    kept = {}
    for name in names:
        refuse_a_list(name, modules[name], "precision.keep_fp32")
        around = name.rpartition(".")[0]
        if not isinstance(modules.get(around), nn.MultiheadAttention):
            kept[name] = modules[name]
        elif around not in names:
            raise BadInputError(
                f"precision.keep_fp32: '{name}' is only read by the attention around it; name that"
            )
    return kept


def keep_in_fp32(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Makes modules compute in float32 under autocast, too, in place; names stay."""
    for module in modules:
        module.forward = functools.partial(_in_fp32, module.forward, device.type)


def _in_fp32(forward: Callable[..., Any], device_type: str, *values: Any, **named: Any) -> Any:
    with torch.autocast(device_type, enabled=False):
        return forward(*map(_float32, values), **{name: _float32(value) for name, value in named.items()})


def _float32(value: Any) -> Any:
    # Only the dtypes of autocast: integers are indices, and float64 is the user's choice.
    low = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if low else value


def found_inf(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Returns 1.0 on the device if this step's gradients overflowed, else 0.0; float32 (), not synchronized.

    torch has no public function for it. A comparison of the scale before and after would miss a scale that
    can't shrink, and cost a copy.
    """
    flags = list(scaler._found_inf_per_device(optimizer).values())
    return flags[0] if flags else torch.zeros_like(scale_of(scaler))


def scale_of(scaler: GradScaler) -> torch.Tensor:
    """Returns the loss scale, float32 () on its device; the public get_scale would synchronize."""
    scale = scaler._get_scale_async()
    assert scale is not None  # it exists once a loss has been scaled
    return scale


class Precision:
    """Backward pass and update without a loss scale: fp32, tf32, bf16.

    Attributes:
        autocast: Context of a forward pass; entered repeatedly.
        scaler: Loss scaler of fp16, or None.
        may_skip: True if updates may be skipped, decided on the device.
    """

    scaler: GradScaler | None = None
    may_skip = False

    def __init__(self, autocast: AbstractContextManager[object]) -> None:
        """Takes the context of a forward pass, see `autocast`."""
        self.autocast = autocast

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        """Accumulates the gradients of a micro-batch's loss, float (); returns the loss detached."""
        loss.backward()
        return loss.detach()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the loss scale, before they are clipped."""

    def judged(self, norm: torch.Tensor) -> torch.Tensor:
        """Returns the gradient norm for anomaly detection, float ()."""
        return norm

    def update(self, optimizer: torch.optim.Optimizer, norm: torch.Tensor) -> torch.Tensor | None:  # noqa: ARG002
        """Updates the weights.

        Args:
            optimizer: Optimizer whose gradients have been unscaled and clipped.
            norm: Gradient norm before clipping, float ().

        Returns:
            float (), on the device: 1 if the update was skipped; None if updates are never skipped.
        """
        optimizer.step()
        return None


class SkippingPrecision(Precision):
    """Precision that skips an update whose loss or gradients aren't finite (anomaly.nonfinite=skip)."""

    may_skip = True

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        """See `Precision.backward`."""
        detached = loss.detach()
        loss.backward(_one_if_finite(detached))
        return detached

    def update(self, optimizer: torch.optim.Optimizer, norm: torch.Tensor) -> torch.Tensor | None:
        """See `Precision.update`."""
        skipped = (~norm.isfinite()).to(torch.float32)
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.found_inf = skipped  # type: ignore[attr-defined]  # as GradScaler sets it
            optimizer.step()
        elif not bool(skipped):  # the user's optimizer, which may not support skipped updates
            optimizer.step()
        return skipped


class ScaledPrecision(Precision):
    """fp16: losses are scaled up, and an update whose gradients overflow is skipped."""

    may_skip = True

    def __init__(
        self,
        autocast: AbstractContextManager[object],
        scaler: GradScaler,
        skip_nonfinite: bool,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Initializes fp16.

        Args:
            autocast: Context of a forward pass.
            scaler: Loss scaler.
            skip_nonfinite: True to skip the update on every rank if a loss isn't finite.
            group: Ranks that share a sharded model, and skip an update together.
        """
        super().__init__(autocast)
        self.scaler: GradScaler = scaler
        self._skip_nonfinite, self._group = skip_nonfinite, group

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        """See `Precision.backward`."""
        scaled, detached = self.scaler.scale(loss), loss.detach()
        scaled.backward(_one_if_finite(detached) if self._skip_nonfinite else None)
        return detached

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """See `Precision.unscale`."""
        self.scaler.unscale_(optimizer)
        if self._group is not None:
            dist.all_reduce(found_inf(self.scaler, optimizer), dist.ReduceOp.MAX, group=self._group)

    def judged(self, norm: torch.Tensor) -> torch.Tensor:
        """Returns 0 in place of the norm, as the scaler handles overflows, unless the scale is below 1."""
        return torch.where(scale_of(self.scaler) < 1, norm, 0.0)

    def update(self, optimizer: torch.optim.Optimizer, norm: torch.Tensor) -> torch.Tensor | None:  # noqa: ARG002
        """See `Precision.update`."""
        skipped = found_inf(self.scaler, optimizer)
        if not self.scaler._found_inf_per_device(optimizer):  # no gradient at all: torch would assert
            self.scaler.update(scale_of(self.scaler))  # keeps the scale, and ends the scaler's step
            return skipped
        self.scaler.step(optimizer)
        self.scaler.update()
        return skipped


def _one_if_finite(loss: torch.Tensor) -> torch.Tensor:
    # A loss that isn't finite makes all gradients NaN, so that every rank sees it in their sum.
    return loss * 0 + 1


def gathered_in(config: PrecisionConfig, model: nn.Module, device: torch.device) -> torch.dtype | None:
    """Returns the dtype in which FSDP gathers the parameters of blocks; None: their own.

    It is bfloat16 where autocast would round them anyway: not if a module computes in float32, as in
    `precision.keep_fp32` and BatchNorm, whose statistics have its weights' dtype; and not for other norms on
    a CPU, whose kernels don't take bfloat16 weights with float32 inputs.
    """
    norms: tuple[type[nn.Module], ...] = (nn.modules.batchnorm._BatchNorm,)
    if device.type == "cpu":
        norms = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)
    full = config.keep_fp32 or any(isinstance(module, norms) for module in model.modules())
    return torch.bfloat16 if config.mode == "bf16" and not full else None


def make_precision(
    config: PrecisionConfig,
    device: torch.device,
    skip_nonfinite: bool,
    group: dist.ProcessGroup | None = None,
) -> Precision:
    """Returns the precision of a recipe on a device; `group`: the ranks that share a sharded model."""
    context = autocast(config, device)
    if config.mode == "fp16":  # needs a loss scaler (Micikevicius et al., 2018)
        scale, interval = config.initial_scale, config.growth_interval
        scaler = GradScaler(device.type, init_scale=scale, growth_interval=interval)
        return ScaledPrecision(context, scaler, skip_nonfinite, group)
    return SkippingPrecision(context) if skip_nonfinite else Precision(context)
