"""Number formats: what autocast computes in, and the loss scale that fp16 needs."""

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


def found_inf(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """1.0 if the gradients of this step overflowed, else 0.0, also without any; float32 () there, unread.

    There is no public name for it. Reading the scale before and after instead would miss a scale that
    can't shrink, and cost a copy.
    """
    found = list(scaler._found_inf_per_device(optimizer).values())
    return found[0] if found else torch.zeros_like(scale_of(scaler))


def scale_of(scaler: GradScaler) -> torch.Tensor:
    """The loss scale, float32 () on its device; the public get_scale would wait for it."""
    scale = scaler._get_scale_async()
    assert scale is not None  # it exists once a loss has been scaled
    return scale


class Precision:
    """How a step computes and updates where no loss scale is needed: fp32, tf32, bf16.

    Attributes:
        autocast: Context of a forward pass; entered again and again.
        scaler: The loss scaler of fp16, or None.
        may_skip: Whether an update may be skipped, which only the device knows.
    """

    scaler: GradScaler | None = None
    may_skip = False

    def __init__(self, autocast: AbstractContextManager[object]) -> None:
        """Computes within a context, see `autocast`."""
        self.autocast = autocast

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        """Adds the gradients of a micro-batch's loss, float (); returns it detached."""
        loss.backward()
        return loss.detach()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives the gradients their true size, before they are clipped."""

    def judged(self, norm: torch.Tensor) -> torch.Tensor:
        """The gradient norm, float (), as anomaly detection is to see it."""
        return norm

    def update(self, optimizer: torch.optim.Optimizer, norm: torch.Tensor) -> torch.Tensor | None:  # noqa: ARG002
        """Updates the weights.

        Args:
            optimizer: Whose gradients have been unscaled and clipped.
            norm: Their norm before that, float (); only looked at where it decides on the update.

        Returns:
            float (), on the device: 1 if the update was skipped; None where that can't be.
        """
        optimizer.step()
        return None


class SkippingPrecision(Precision):
    """The same, but an update whose loss or gradients aren't finite is not made (anomaly.nonfinite=skip)."""

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
            optimizer.found_inf = skipped  # type: ignore[attr-defined]  # as GradScaler tells it
            optimizer.step()
        elif not bool(skipped):  # somebody's own, which needn't know of it
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
        """With `skip_nonfinite` a loss that isn't finite skips the update on every rank.

        The ranks of `group` have a part of the gradients each, and skip an update together.
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
        """An overflow is the scaler's business, unless the scale is too small to be the cause."""
        return torch.where(scale_of(self.scaler) < 1, norm, 0.0)

    def update(self, optimizer: torch.optim.Optimizer, norm: torch.Tensor) -> torch.Tensor | None:  # noqa: ARG002
        """See `Precision.update`."""
        skipped = found_inf(self.scaler, optimizer)
        if not self.scaler._found_inf_per_device(optimizer):  # no gradient at all, which torch's asserts
            self.scaler.update(scale_of(self.scaler))  # the scale stays, and the next step is a new one
            return skipped
        self.scaler.step(optimizer)
        self.scaler.update()
        return skipped


def _one_if_finite(loss: torch.Tensor) -> torch.Tensor:
    # A loss that isn't finite makes all gradients NaN: so every rank sees it, by their sum.
    return loss * 0 + 1


def gathered_in(config: PrecisionConfig, model: nn.Module, device: torch.device) -> torch.dtype | None:
    """What the parameters of blocks are gathered in where a model is sharded; None: as they are.

    In bfloat16 where autocast would round them so anyway: not where a module computes in float32, as those
    of `precision.keep_fp32` do, and BatchNorm, whose statistics have its weights' type; nor on a CPU where
    there are other norms, whose kernels take no such weights with what is still in float32.
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
    """The precision of a recipe on a device; `group`: the ranks that share a sharded model."""
    context = autocast(config, device)
    if config.mode == "fp16":  # which alone needs a loss scaler (Micikevicius et al., 2018)
        scale, interval = config.initial_scale, config.growth_interval
        scaler = GradScaler(device.type, init_scale=scale, growth_interval=interval)
        return ScaledPrecision(context, scaler, skip_nonfinite, group)
    return SkippingPrecision(context) if skip_nonfinite else Precision(context)
