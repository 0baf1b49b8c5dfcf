"""The task of `simple` without BatchNorm, whose last batch may be padded."""

from typing import Any

from torch import nn

from trainer.commands.check.known import simple

RECIPE: dict[str, Any] = {
    "epochs": 2,
    "optim": {"lr": 0.02, "weight_decay": 0.2, "warmup_steps": 2, "max_grad_norm": 0.5},
}


class Unnormed(simple.Simple):
    """The same samples and loss."""

    def model(self) -> nn.Module:
        """Returns a new model."""
        return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 1))
