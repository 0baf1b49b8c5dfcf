"""A task with BatchNorm, dropout and repeated blocks, in which known faults are to be seen."""

from typing import Any

import numpy as np
from torch import nn
from torch.nn import functional as F

RECIPE: dict[str, Any] = {
    "epochs": 2,
    "optim": {"lr": 0.02, "weight_decay": 0.2, "warmup_steps": 2, "max_grad_norm": 0.5},
}


def small_block(width: int) -> nn.Module:
    """Returns a block with BatchNorm and dropout."""
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.2))


class Simple:
    """Regression on 40 samples of six numbers."""

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
