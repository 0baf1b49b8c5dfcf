"""Tasks with BatchNorm, dropout and repeated blocks, in which known faults are to be seen."""

from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


def small_block(width: int) -> nn.Module:
    """Returns a block with BatchNorm and dropout."""
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.2))


class Simple:
    """Regression on 40 samples of six numbers."""

    RECIPE: ClassVar[dict[str, Any]] = {
        "epochs": 2,
        "optim": {"lr": 0.02, "weight_decay": 0.2, "warmup_steps": 2, "max_grad_norm": 0.5},
    }

    def data(self) -> Any:
        """Returns training and evaluation samples."""
        random = np.random.default_rng(0)
        x = random.normal(size=(40, 6)).astype(np.float32)
        y = (x[:, :1] - x[:, 1:2] * x[:, 2:3]).astype(np.float32)
        return {"x": x[:30], "y": y[:30]}, {"x": x[30:], "y": y[30:]}

    def model(self) -> nn.Module:
        """Returns a new model."""
        return nn.Sequential(small_block(6), small_block(6), nn.Linear(6, 1))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        """Returns squared errors."""
        return F.mse_loss(model(batch.fields["x"]), batch.fields["y"], reduction="none")

    def measure(self, model: nn.Module, batch: Any) -> Any:
        """Returns the same as a metric."""
        return {"loss": self.loss(model, batch)}


class Unnormed(Simple):
    """The same samples and loss, without BatchNorm: the last batch may be padded."""

    def model(self) -> nn.Module:
        """Returns a new model."""
        return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 1))


class Ragged(Simple):
    """Samples that count once to three times."""

    def data(self) -> Any:
        """Returns training and evaluation samples with their counts."""
        train, evaluation = super().data()
        for samples in (train, evaluation):
            samples["count"] = (np.arange(len(samples["x"])) % 3 + 1).astype(np.int64)
        return train, evaluation

    def loss(self, model: nn.Module, batch: Any) -> Any:
        """Returns squared errors and counts."""
        return super().loss(model, batch)[:, 0], batch.fields["count"]


class Moving(nn.Module):
    """A mean that moves in training and in evaluation, a count, and a layer for few samples."""

    mean: torch.Tensor
    positive: torch.Tensor

    def __init__(self) -> None:
        """Begins at 0."""
        super().__init__()
        self.first, self.last, self.seldom = nn.Linear(6, 6), nn.Linear(6, 1), nn.Linear(6, 1)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("positive", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, seldom: torch.Tensor) -> torch.Tensor:
        """Returns (n, 1) for x (n, 6); `seldom`, int64 (n,), is 1 for samples of the seldom layer."""
        x = self.first(x)
        self.mean.lerp_(x.detach().mean(0), 0.1)
        self.positive += (x[:, 0] > 0).sum()
        x = (x - self.mean).tanh()
        chosen = seldom[:, None] > 0
        y: torch.Tensor = self.last(x)
        return torch.where(chosen, self.seldom(x), y) if bool(chosen.any()) else y


class Several(Simple):
    """Two losses, a watched figure, a frozen layer, moving buffers, and a layer for few samples."""

    RECIPE: ClassVar[dict[str, Any]] = {
        "epochs": 2,
        "model": {"freeze": ["first"]},
        "optim": {"lr": 0.02, "weight_decay": 0.2},
    }
    losses = ("error", "size")
    watched = ("length",)

    def data(self) -> Any:
        """Returns training and evaluation samples."""
        train, evaluation = super().data()
        for samples in (train, evaluation):
            samples["seldom"] = (np.arange(len(samples["x"])) % 15 == 3).astype(np.int64)
        return train, evaluation

    def model(self) -> nn.Module:
        """Returns a new model."""
        return Moving()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        """Returns squared errors, squares of the outputs, and what is watched."""
        y = model(batch.fields["x"], batch.fields["seldom"])
        error, size = (y - batch.fields["y"]).square(), 0.1 * y.square()
        return {"error": error, "size": size, "length": y.detach().abs()}

    def measure(self, model: nn.Module, batch: Any) -> Any:
        """Returns the loss as a metric."""
        parts = self.loss(model, batch)
        return {"loss": parts["error"] + parts["size"]}


class Own(Simple):
    """The same samples, model and loss, with an optimizer and a scheduler of its own."""

    RECIPE: ClassVar[dict[str, Any]] = {"epochs": 2}

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Returns NAdam with another rate for the last layer."""
        *rest, weight, bias = model.parameters()
        groups: list[dict[str, Any]] = [{"params": rest}, {"params": [weight, bias], "lr": 0.05}]
        return torch.optim.NAdam(groups, lr=0.02)

    def scheduler(self, optimizer: torch.optim.Optimizer, steps: int) -> Any:
        """Returns a rate that falls at each update."""
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5 ** (1 / steps))
