"""The recipe's optimizers, the learning rate on the device, and gradient clipping.

An update skipped by fp16's scaler is known on the device alone, and reading it would synchronize. So the
count of updates is on the device, and indexes a table of learning rates there.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from trainer.config.optimizers import OPTIMIZERS
from trainer.config.registry import named
from trainer.config.training import OptimConfig
from trainer.distributed.overlap import is_dense, sharing_memory
from trainer.distributed.sharding import weights
from trainer.errors import BadInputError
from trainer.models.activation_checkpointing import blocks
from trainer.models.names import chosen_parameters
from trainer.optim.own import ConstantSchedule


class PreallocatedOptimizer(Protocol):
    """Interface of the classes in `OPTIMIZERS`, in addition to torch.optim.Optimizer.

    The constructor creates all state, tensors of zeros, so that a checkpoint can be loaded into it. Optional
    are `split(groups, model)`, which splits and marks parameter groups, and a `note` for the start of a run.
    A class without GradScaler's protocol isn't called for a skipped update, at the cost of a synchronization.
    """

    @staticmethod
    def moments(parameter: torch.Tensor, group: Mapping[str, Any]) -> float:
        """Returns the state elements per element of a parameter; the group has the settings, too."""


class LRScheduler:
    """Learning rate on the device, looked up by the number of updates.

    Attributes:
        updates: int64 (1,): updates so far; stands still when the scaler skips one.
        current: float32 (): learning rate of the update to come.
    """

    def __init__(self, rates: list[float], device: torch.device, factors: tuple[float, ...] = ()) -> None:
        """Puts the table on the device; its last value also holds for updates beyond it.

        Args:
            rates: Learning rate of each update.
            device: Device of the weights.
            factors: Factors of the rate for groups of parameters, see `of`.
        """
        self._table = torch.tensor([*rates, rates[-1]], dtype=torch.float32, device=device)
        self.updates = torch.zeros(1, dtype=torch.int64, device=device)
        self._current = torch.zeros(1, dtype=torch.float32, device=device)
        self.current = self._current.view(())
        self._one = torch.ones(1, dtype=torch.int64, device=device)
        slower = [factor for factor in factors if factor != 1]
        self._factors = torch.tensor(slower, dtype=torch.float32, device=device) if slower else None
        self._slower = torch.zeros(len(slower), dtype=torch.float32, device=device)
        self._of = {1.0: self.current, **dict(zip(slower, self._slower.unbind(), strict=True))}
        self._skipped: torch.Tensor | None = None
        self.look_up()

    def of(self, factor: float) -> torch.Tensor:
        """Returns the current rate times one of the factors, float32 (), as a view for a parameter group."""
        return self._of[factor]

    def look_up(self) -> None:
        """Sets the rates of the next update."""
        torch.index_select(self._table, 0, self.updates, out=self._current)
        if self._factors is not None:
            torch.mul(self._factors, self._current, out=self._slower)

    def advance(self, skipped: torch.Tensor | None = None) -> None:
        """Counts an update, unless `skipped` (float (), on the device) is 1."""
        self._skipped = skipped
        self.updates += self._one if skipped is None else self._one - skipped.to(torch.int64)
        self.look_up()

    def of_last_update(self) -> torch.Tensor:
        """Returns the rate of the last update, made or skipped, float32 (), on the device."""
        # Computed on demand, so that steps without a metrics record don't pay for it.
        index = (
            self.updates - 1 if self._skipped is None else self.updates - 1 + self._skipped.to(torch.int64)
        )
        return self._table.index_select(0, index.clamp_(min=0)).view(())


def layer_factors(model: nn.Module, decay: float) -> dict[str, float]:
    """Returns the factor of the learning rate of each parameter (Clark et al., 2020; Bao et al., 2022).

    Parameters after the last block have 1, the last block `decay`, the one before `decay` squared, and
    parameters before the first block the smallest factor, in the order in which the model lists them.
    """
    if decay == 1:
        return {name: 1.0 for name, _ in model.named_parameters()}
    names = list(blocks(model))
    factors, inside = {}, False
    for name, _ in model.named_parameters():
        block = next((number for number, block in enumerate(names) if name.startswith(f"{block}.")), None)
        inside = inside or block is not None
        outside = len(names) + 1 if inside else 0
        factors[name] = decay ** (len(names) + 1 - (outside if block is None else block + 1))
    return factors


def undecayed(config: OptimConfig, model: nn.Module) -> list[str]:
    """Returns the trained parameters without weight decay: norms, biases, and those in `no_decay`.

    Raises:
        BadInputError: If a pattern of `no_decay` matches nothing.
    """
    excluded = chosen_parameters(model, config.no_decay, "optim.no_decay")
    return [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and (excluded(name) or not (p.ndim >= 2 or config.decay_1d))
    ]


def parameter_groups(config: OptimConfig, model: nn.Module) -> list[dict[str, Any]]:
    """Returns parameter groups with `params`, `weight_decay`, and `factor` of the learning rate.

    A parameter that shares memory with another has its own group: a kernel may update a group at once, and
    these must be updated one after the other.

    Raises:
        BadInputError: If the optimizer is for no parameter of the model, or `no_decay` matches none.
    """
    factors, kept = layer_factors(model, config.layer_decay), {*undecayed(config, model)}
    groups: dict[tuple[float, float, str], list[nn.Parameter]] = {}
    trained = {name: parameter for name, parameter in weights(model).items() if parameter.requires_grad}
    for name, parameter in trained.items():
        if not is_dense(parameter):
            raise BadInputError(
                f"the model's parameter '{name}' is a view with gaps (strides {parameter.stride()} for the "
                f"shape {tuple(parameter.shape)}), which fused optimizers can't update: give it memory of "
                "its own by .contiguous().clone(), or give the task an optimizer of its own"
            )
    apart = sharing_memory({name: parameter.detach() for name, parameter in trained.items()})
    for decayed in (True, False):
        for name, parameter in trained.items():
            if (name not in kept) == decayed:
                alike = (
                    config.weight_decay if decayed else 0.0,
                    factors[name],
                    name if name in apart else "",
                )
                groups.setdefault(alike, []).append(parameter)
    alike_groups = [
        {"params": params, "weight_decay": weight_decay, "factor": factor}
        for (weight_decay, factor, _), params in groups.items()
    ]
    split = getattr(named(OPTIMIZERS[config.name].opens), "split", None)
    return alike_groups if split is None else split(alike_groups, model)


def moments_kept(config: OptimConfig, model: nn.Module) -> dict[int, float]:
    """Returns the optimizer's state elements per element of each trained parameter, by `id`."""
    kind, groups = named(OPTIMIZERS[config.name].opens), [{"params": [*model.parameters()]}]
    if hasattr(kind, "split"):
        groups = kind.split(groups, model)
    settings = _settings(config)
    return {
        id(p): kind.moments(p, {**settings, **group})
        for group in groups
        for p in group["params"]
        if p.requires_grad
    }


def _settings(config: OptimConfig) -> dict[str, Any]:
    return {key: getattr(config, key) for key in OPTIMIZERS[config.name].reads}


def bytes_of_moments(config: OptimConfig, model: nn.Module, own: bool = False) -> int:
    """Returns the bytes of the optimizer's state; `own`: only of this rank's rows of a sharded model."""
    kept, rows = moments_kept(config, model), weights(model)
    sizes = {id(one): (rows[name] if own else one).nbytes for name, one in model.named_parameters()}
    return sum(round(number * sizes[parameter]) for parameter, number in kept.items())


def make_optimizer(
    config: OptimConfig, groups: list[dict[str, Any]], scheduler: LRScheduler | ConstantSchedule
) -> torch.optim.Optimizer:
    """Creates the optimizer of a recipe.

    Args:
        config: Name and settings.
        groups: From `parameter_groups`.
        scheduler: Rates of the groups by their factors.
    """
    groups = [{**group, "lr": scheduler.of(group["factor"])} for group in groups]
    kind: type[torch.optim.Optimizer] = named(OPTIMIZERS[config.name].opens)
    return kind(groups, lr=scheduler.current, **_settings(config))  # type: ignore[call-arg]


def grad_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Returns the joint 2-norm of gradients, float ()."""
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    return norm


def clip_gradients(
    gradients: list[torch.Tensor], largest: float, norm: torch.Tensor | None = None
) -> torch.Tensor:
    """Scales gradients so that their joint 2-norm is at most `largest` (Pascanu et al., 2013).

    It is the arithmetic of torch.nn.utils.clip_grad_norm_ without its sorting by device and dtype, which
    takes longer than the computation: there is one device and one dtype here.

    Args:
        gradients: All gradients, or this rank's rows of them.
        largest: Largest norm.
        norm: Norm over all ranks, float (), if these are one rank's rows.

    Returns:
        Norm before clipping, float ().
    """
    if norm is None:
        norm = grad_norm(gradients)
    torch._foreach_mul_(gradients, (largest / (norm + 1e-6)).clamp_(max=1.0))
    return norm
