"""The task of `simple` with an optimizer and a scheduler of its own."""

from typing import Any

import torch
from torch import nn

from trainer.commands.check.known import simple

RECIPE: dict[str, Any] = {"epochs": 2}


class Own(simple.Simple):
    """The same samples, model and loss."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Returns NAdam with another rate for the last layer."""
        *rest, weight, bias = model.parameters()
        groups: list[dict[str, Any]] = [{"params": rest}, {"params": [weight, bias], "lr": 0.05}]
        return torch.optim.NAdam(groups, lr=0.02)

    def scheduler(self, optimizer: torch.optim.Optimizer, steps: int) -> Any:
        """Returns a rate that falls at each update."""
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5 ** (1 / steps))
