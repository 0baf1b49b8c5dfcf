"""Optimisers, learning-rate schedules and the moving average of weights.

Whether fp16's scaler skipped an update is known on the device only, and asking would stall the host. So
the count of applied updates lives there, and the learning rate is looked up by it from a table.
"""

import copy
import math
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import nn

from trainer.config import Section
from trainer.muon import Muon, hidden_matrices, split_groups

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Section):
    """How weights are updated."""

    name: Literal["sgd", "adamw", "muon"] = Field(
        "adamw", description="optimiser: sgd (Nesterov), adamw, or muon (hidden matrices; adamw for the rest)"
    )
    lr: float = Field(1e-3, gt=0, description="peak learning rate")
    schedule: Literal["cosine", "one-cycle", "constant"] = Field(
        "cosine",
        description="cosine to 0, one-cycle (cosine up over the warm-up, cosine down), or constant",
    )
    warmup: float = Field(
        0.05, ge=0, lt=1, description="share of the updates with a linear rise of the learning rate"
    )
    weight_decay: float = Field(0.01, ge=0, description="weight decay; not on norms and biases")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum (sgd; muon, usually 0.95)")
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), description="decay of the moments (adamw, muon)")
    eps: float = Field(1e-8, gt=0, description="added to the denominator (adamw, muon)")
    clip: float = Field(0.0, ge=0, description="largest global gradient norm; 0: no clipping")
    ema: float = Field(0.0, ge=0, lt=1, description="decay of the weights' moving average; 0: none")


def schedule(config: OptimConfig, updates: int) -> list[float]:
    """Learning rate of each update.

    Cosine: Loshchilov and Hutter, 2017. One-cycle: Smith and Topin, 2018, with cosine sides, from 1/25
    of the peak to 0.

    Args:
        config: Peak, shape and warm-up.
        updates: Number of updates of the run.

    Returns:
        `updates` learning rates.
    """
    warmup = round(config.warmup * updates)
    rates = []
    for update in range(updates):
        if update < warmup:
            rise = (update + 1) / warmup
            share = (
                0.04 + 0.96 * (1 - math.cos(math.pi * rise)) / 2 if config.schedule == "one-cycle" else rise
            )
        elif config.schedule == "constant":
            share = 1.0
        else:
            share = (1 + math.cos(math.pi * (update - warmup) / max(1, updates - warmup))) / 2
        rates.append(config.lr * share)
    return rates


class Rates:
    """The learning rate, on the device, looked up by the number of applied updates.

    Attributes:
        applied: int64 (1,): updates so far; stands still when the scaler skips one.
        current: float32 (): learning rate of the update to come; what the optimiser holds.
    """

    def __init__(self, rates: list[float], device: torch.device) -> None:
        """Puts the table on the device; its last value is repeated for an update beyond the plan."""
        self._table = torch.tensor([*rates, rates[-1]], dtype=torch.float32, device=device)
        self.applied = torch.zeros(1, dtype=torch.int64, device=device)
        self._current = torch.zeros(1, dtype=torch.float32, device=device)
        self.current = self._current.view(())
        self._one = torch.ones(1, dtype=torch.int64, device=device)
        self.look_up()

    def look_up(self) -> None:
        """Sets `current` for the update to come."""
        torch.index_select(self._table, 0, self.applied, out=self._current)

    def advance(self, skipped: torch.Tensor | None = None) -> None:
        """Counts an update, unless `skipped` (float (), on the device) is 1."""
        self.applied += self._one if skipped is None else self._one - skipped.to(torch.int64)
        self.look_up()


def make_optimizer(config: OptimConfig, model: nn.Module, rate: torch.Tensor) -> torch.optim.Optimizer:
    """A fused optimiser: one kernel, and no reading of the device when fp16's scaler skips.

    Args:
        config: Which, and its settings.
        model: Its parameters; those of less than two dimensions are not decayed.
        rate: float32 () on the device, shared by all groups.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.name == "sgd":
        sgd = torch.optim.SGD(
            groups, lr=rate, momentum=config.momentum, nesterov=config.momentum > 0, fused=True
        )
        # torch's fused SGD leaves these uninitialised if the scaler skips the very first update, as it
        # usually does, and then adds whatever was in that memory to the weights (seen in 2.9.1).
        for parameter in trained if config.momentum else ():
            sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return sgd
    if config.name == "muon":
        parts = split_groups(groups, hidden_matrices(model))
        return Muon(parts, lr=rate, momentum=config.momentum, betas=config.betas, eps=config.eps)
    return torch.optim.AdamW(groups, lr=rate, betas=config.betas, eps=config.eps, fused=True)


def clip_gradients(gradients: list[torch.Tensor], largest: float) -> torch.Tensor:
    """Scales gradients so that their joint 2-norm is at most `largest` (Pascanu et al., 2013).

    The arithmetic of torch.nn.utils.clip_grad_norm_ without its sorting by device and dtype, which takes
    longer than the computation: there is one device and one dtype here.

    Returns:
        The norm before, float ().
    """
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    torch._foreach_mul_(gradients, (largest / (norm + 1e-6)).clamp_(max=1.0))
    return norm


class WeightAverage:
    """Exponential moving average of the weights (Polyak and Juditsky, 1992)."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        """Starts from the weights as they are."""
        self.model = copy.deepcopy(model).requires_grad_(False)
        self._decay = decay
        self._average = [parameter.data for parameter in self.model.parameters()]
        self._weights = [parameter.data for parameter in model.parameters()]
        self._buffers = list(zip(self.model.buffers(), model.buffers(), strict=True))

    def update(self, applied: int) -> None:
        """Moves towards the weights after an update.

        Args:
            applied: Updates before this one. At first the average follows faster: the decay is at most
                (1 + applied) / (10 + applied), as in TensorFlow's ExponentialMovingAverage.
        """
        share = max(1 - self._decay, 9 / (10 + applied))
        torch._foreach_lerp_(self._average, self._weights, share)

    def update_unless(self, skipped: torch.Tensor, applied: torch.Tensor) -> None:
        """The same where only the device knows.

        Args:
            skipped: float (): 1 if there was no update.
            applied: int64 (1,): updates before this window's.
        """
        share = (9 / (10 + applied[0])).clamp_(min=1 - self._decay) * (1 - skipped)
        step = torch._foreach_sub(self._weights, self._average)
        torch._foreach_mul_(step, share)
        torch._foreach_add_(self._average, step)

    def averaged(self) -> nn.Module:
        """The model with averaged weights; its buffers are the trained model's."""
        for target, source in self._buffers:
            target.copy_(source)
        return self.model
