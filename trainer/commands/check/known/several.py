"""A task with two losses, a watched figure, a frozen layer, moving buffers, and a layer for few samples."""

from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.commands.check.known import simple

RECIPE: dict[str, Any] = {
    "epochs": 2,
    "model": {"freeze": ["first"]},
    "optim": {"lr": 0.02, "weight_decay": 0.2},
}


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


class Several(simple.Simple):
    """The samples of `simple`, few of which have a layer of their own."""

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
