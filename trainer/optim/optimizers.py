"""Optimizers, learning-rate schedules and gradient clipping.

Whether fp16's scaler skipped an update is known on the device only, and asking would stall the host. So
the count of updates lives there, and the learning rate is looked up by it from a table.
"""

import inspect
import math
from typing import Any

import torch
from torch import nn
from typing_extensions import assert_never

from trainer.config.training import OptimConfig
from trainer.distributed.overlap import is_dense, shared
from trainer.distributed.sharding import weights
from trainer.errors import BadInputError
from trainer.models.activation_checkpointing import blocks
from trainer.optim.muon import Muon, hidden_matrices, split_groups
from trainer.optim.own import ConstantSchedule


# torch wraps methods of its optimizers for callers that are compiled, and these wrappers import the compiler:
# a second of CPU in each rank's start. Here the optimizer is never called from compiled code, so the methods
# come without; a torch that doesn't wrap them gives the same.
class AdamW(torch.optim.AdamW):
    """torch's, without what it does for torch.compile, and its fused kernel without the way there.

    Attributes:
        moments: Tensors that it keeps of each parameter, of its size; likewise of the other optimizers.

    That way (making state where there is none, sorting by device and dtype, a name for the profiler) is
    Python that takes longer than the kernel of a small model (docs/results/overhead.md), and grows with the
    parameters.
    """

    moments = 2
    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    _step_by_torch = torch.optim.Optimizer.profile_hook_step(
        torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))
    )
    _alike = False

    def __init__(self, groups: list[dict[str, Any]], **settings: Any) -> None:
        """As torch's, with `fused` and without `amsgrad`, `maximize` and `differentiable`."""
        super().__init__(groups, **settings)
        kinds = [{(p.device, p.dtype) for p in group["params"]} for group in self.param_groups]
        self._alike = all(len(kind) == 1 for kind in kinds)

    def step(self, closure: Any = None) -> Any:
        """Updates the parameters that have a gradient; with anything out of the ordinary by torch's step."""
        groups = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        states = [[self.state[p] for p in params] for _, params in groups]
        hooked = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        skips = getattr(self, "found_inf", None) is not None
        if closure is not None or hooked or skips or not self._alike or not all(map(all, states)):
            return self._step_by_torch(closure)
        with torch.no_grad():
            for (group, params), own in zip(groups, states, strict=True):
                _fused_adamw(group, params, own)
        return None

    step.hooked = True  # type: ignore[attr-defined]  # else torch puts its name and its hooks around it


def _fused_adamw(group: dict[str, Any], params: list[torch.Tensor], states: list[dict[str, Any]]) -> None:
    if not params:
        return
    steps = [state["step"] for state in states]
    torch._foreach_add_(steps, 1)
    torch._fused_adamw_(
        params,
        [p.grad for p in params if p.grad is not None],
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        steps,
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )


class SGD(torch.optim.SGD):
    """torch's, without what it does for torch.compile."""

    moments = 1  # with a momentum
    add_param_group = inspect.unwrap(torch.optim.SGD.add_param_group)
    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))


def schedule(config: OptimConfig, updates: int, steps_per_epoch: float) -> list[float]:
    """Learning rate of each update; update n has the rate of torch's scheduler after n calls of its step().

    With W updates of warm-up (`warmup_steps`; a share is rounded), and update W the first after it:

    - The warm-up is LinearLR(start_factor=1/W, total_iters=W-1): 1/W of the peak to the peak.
    - constant: ConstantLR(factor=1).
    - cosine (Loshchilov and Hutter, 2017): CosineAnnealingLR(T_max=updates-W), so the last update is one
      step above `final_lr`.
    - step (He et al., 2016): MultiStepLR, milestones rounded up to whole updates and counted from the start.
    - one-cycle (Smith and Topin, 2018): OneCycleLR(pct_start=W/updates) with cosine sides, from 1/25 of the
      peak to 1/25/1e4, or to `final_lr` where that is more; the momentum is not cycled. Its peak lies
      between two updates where a share of them isn't whole, and it has its own warm-up.
    - wsd (Hu et al., 2024, MiniCPM), which torch lacks: constant, then 1 - sqrt of Hagele et al., 2024; the
      decay takes what the warm-up leaves, if that is less.

    Args:
        config: Peak, shape and warm-up.
        updates: Number of updates of the run.
        steps_per_epoch: What milestones count in; no whole number where a step has samples of two epochs.

    Returns:
        `updates` learning rates.
    """
    if config.schedule == "one-cycle":
        return [config.lr * _one_cycle(config, update, updates) for update in range(updates)]
    # A run may have millions of updates.
    warmup = round(_warmup(config, updates))
    shares = [(update + 1) / warmup for update in range(min(warmup, updates))]
    shares += _warmed_up(config, range(warmup, updates), steps_per_epoch)
    return [config.lr * share for share in shares]


def _warmup(config: OptimConfig, updates: int) -> float:
    """Updates of the warm-up; a share of them may be no whole number."""
    return config.warmup_steps * updates if config.warmup_steps < 1 else config.warmup_steps


def _one_cycle(config: OptimConfig, update: int, updates: int) -> float:
    """Share of the peak."""
    first, final = 1 / 25, max(config.final_lr, 1 / 25 / 1e4)
    top = _warmup(config, updates) - 1  # may be no whole number; below 0, torch begins past the peak
    if update < top:
        return 1 + (first - 1) * _half_cosine(update / top)
    return final + (1 - final) * _half_cosine((update - top) / (updates - 1 - top or 1))


def _warmed_up(config: OptimConfig, after: range, steps_per_epoch: float) -> list[float]:
    """Shares of the peak, for the updates after the warm-up."""
    match config.schedule:
        case "constant":
            return [1.0] * len(after)
        case "step":
            # Rounded, as 0.55 epochs of 100 steps are 55.00000000000001.
            falls = [round(epochs * steps_per_epoch, 6) for epochs in config.milestones]
            return [float(config.gamma ** sum(update >= fall for fall in falls)) for update in after]
        case "wsd":
            length = max(1, min(round(config.decay * after.stop), len(after)))
            held = after.stop - length
            left = [1 - math.sqrt(max(0, update - held) / length) for update in after]
        case "cosine":
            left = [_half_cosine(number / len(after)) for number in range(len(after))]
        case "one-cycle":
            raise ValueError("one-cycle has its own warm-up")
        case _:
            assert_never(config.schedule)
    final = config.final_lr
    return [final + (1 - final) * share for share in left]


def _half_cosine(part: float) -> float:
    return (1 + math.cos(math.pi * part)) / 2


class LRScheduler:
    """The learning rate, on the device, looked up by the number of updates.

    Attributes:
        updates: int64 (1,): updates so far; stands still when the scaler skips one.
        current: float32 (): learning rate of the update to come.
    """

    def __init__(self, rates: list[float], device: torch.device, factors: tuple[float, ...] = ()) -> None:
        """Puts the table on the device; its last value is repeated for an update beyond the plan.

        Args:
            rates: Of each update.
            device: Where the weights are.
            factors: Groups of parameters may learn slower: factors of the rate, see `of`.
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
        """The current rate times one of the factors, float32 (): what a parameter group holds."""
        return self._of[factor]

    def follow(self, rates: list[float]) -> None:
        """Takes other rates in place of those that it was made with."""
        table = [*rates, rates[-1]]
        self._table = torch.tensor(table, dtype=torch.float32, device=self._table.device)
        self.look_up()

    def look_up(self) -> None:
        """Sets the rates for the update to come."""
        torch.index_select(self._table, 0, self.updates, out=self._current)
        if self._factors is not None:
            torch.mul(self._factors, self._current, out=self._slower)

    def advance(self, skipped: torch.Tensor | None = None) -> None:
        """Counts an update, unless `skipped` (float (), on the device) is 1."""
        self._skipped = skipped
        self.updates += self._one if skipped is None else self._one - skipped.to(torch.int64)
        self.look_up()

    def of_last_update(self) -> torch.Tensor:
        """The rate of the update that was counted last or skipped, float32 (), on the device."""
        # Computed when it is asked for, so that a step doesn't pay for it.
        index = (
            self.updates - 1 if self._skipped is None else self.updates - 1 + self._skipped.to(torch.int64)
        )
        return self._table.index_select(0, index.clamp_(min=0)).view(())


def layer_factors(model: nn.Module, decay: float) -> dict[str, float]:
    """Factor of the learning rate for each parameter (Clark et al., 2020; Bao et al., 2022).

    What comes after the last block has 1, the last block `decay`, the one before `decay` squared, and
    what comes before the first block the least. Before and after are taken from the order in which the
    model lists its parameters.
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


def parameter_groups(config: OptimConfig, model: nn.Module) -> list[dict[str, Any]]:
    """Parameters that are updated alike: `params`, `weight_decay`, and `factor` of the learning rate.

    Those of less than two dimensions (norms, biases) are not decayed. One that shares memory with another
    has a group of its own: a kernel may update a group at once, and these need one after the other.

    Raises:
        BadInputError: If there is nothing that the optimizer is for.
    """
    factors = layer_factors(model, config.layer_decay)
    groups: dict[tuple[float, float, str], list[nn.Parameter]] = {}
    trained = {name: parameter for name, parameter in weights(model).items() if parameter.requires_grad}
    for name, parameter in trained.items():
        if not is_dense(parameter):
            raise BadInputError(
                f"the model's parameter '{name}' is a view with gaps (strides {parameter.stride()} for the "
                f"shape {tuple(parameter.shape)}), which fused optimizers can't update: give it memory of "
                "its own by .contiguous().clone(), or give the task an optimizer of its own"
            )
    apart = shared({name: parameter.detach() for name, parameter in trained.items()})
    for decayed in (True, False):
        for name, parameter in trained.items():
            if (parameter.ndim >= 2) == decayed:
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
    if config.name != "muon":
        return alike_groups
    if not (matrices := hidden_matrices(model)):
        raise BadInputError(
            "optim.name=muon: the model has no matrices between its first and its last layer; use adamw"
        )
    return split_groups(alike_groups, matrices)


def moments_kept(config: OptimConfig, model: nn.Module) -> dict[int, int]:
    """How many tensors of its size the optimizer keeps of each trained parameter, by its `id`."""
    trained = [id(p) for p in model.parameters() if p.requires_grad]
    match config.name:
        case "adamw":
            return dict.fromkeys(trained, AdamW.moments)
        case "sgd":
            return dict.fromkeys(trained, SGD.moments if config.momentum else 0)
        case "muon":
            of_matrices = dict.fromkeys(map(id, hidden_matrices(model)), Muon.moments)
            return dict.fromkeys(trained, AdamW.moments) | of_matrices
        case _:
            assert_never(config.name)


def bytes_of_moments(config: OptimConfig, model: nn.Module, own: bool = False) -> int:
    """Bytes of the optimizer's state; `own`: of a sharded model this rank's alone."""
    kept, rows = moments_kept(config, model), weights(model)
    sizes = {id(one): (rows[name] if own else one).nbytes for name, one in model.named_parameters()}
    return sum(number * sizes[parameter] for parameter, number in kept.items())


def make_optimizer(
    config: OptimConfig, groups: list[dict[str, Any]], scheduler: LRScheduler | ConstantSchedule
) -> torch.optim.Optimizer:
    """A fused optimizer: one kernel, and no reading of the device when fp16's scaler skips.

    Args:
        config: Which, and its settings.
        groups: From `parameter_groups`.
        scheduler: Knows the rates of the groups by their factors.
    """
    groups = [{**group, "lr": scheduler.of(group["factor"])} for group in groups]
    rate, momentum = scheduler.current, config.momentum
    match config.name:
        case "adamw":
            return AdamW(groups, lr=rate, betas=config.betas, eps=config.eps, fused=True)
        case "sgd":
            sgd = SGD(groups, lr=rate, momentum=momentum, nesterov=momentum > 0, fused=True)
            # torch's fused SGD leaves these uninitialized if the scaler skips the very first update, as it
            # usually does, and then adds whatever was in that memory to the weights (seen in 2.9.1).
            for parameter in (p for group in groups for p in group["params"] if momentum):
                sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            return sgd
        case "muon":
            return Muon(groups, lr=rate, momentum=momentum, betas=config.betas, eps=config.eps)
        case _:
            assert_never(config.name)


def grad_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The joint 2-norm of gradients, float ()."""
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    return norm


def clip_gradients(
    gradients: list[torch.Tensor], largest: float, norm: torch.Tensor | None = None
) -> torch.Tensor:
    """Scales gradients so that their joint 2-norm is at most `largest` (Pascanu et al., 2013).

    The arithmetic of torch.nn.utils.clip_grad_norm_ without its sorting by device and dtype, which takes
    longer than the computation: there is one device and one dtype here.

    Args:
        gradients: All of them, or a rank's.
        largest: As above.
        norm: That of all of them, float (), if these are a rank's.

    Returns:
        The norm before, float ().
    """
    if norm is None:
        norm = grad_norm(gradients)
    torch._foreach_mul_(gradients, (largest / (norm + 1e-6)).clamp_(max=1.0))
    return norm
