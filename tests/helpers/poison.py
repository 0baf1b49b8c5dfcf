"""Steps of a small run that go bad, so that the anomaly detection has something to find."""

import math
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from tests.helpers.forked import replace
from tests.helpers.toys import step_under_way
from trainer.tasks.classification import Classification

Harm = Literal["loss", "gradient", "leap"]
SEED: dict[str, Any] = {
    "data": {"augment": "flip"},
    "optim": {"name": "adamw", "lr": 0.01, "max_grad_norm": 1.0},
    "ema": {"decay": 0.3},  # so low that it counts from the start
}


def infinite_slope(model: nn.Module) -> torch.Tensor:
    """Zero, whose gradient is infinite."""
    return torch.stack([(p * 0).sum().abs().sqrt() for p in model.parameters()]).sum()


def poison(steps: Sequence[int], harm: Harm, only_rank: int = 0) -> Callable[[], None]:
    """Makes some steps of a fork go bad."""

    def install() -> None:
        step, original = step_under_way(), Classification.loss

        def harmed(self: Any, model: nn.Module, batch: Any) -> torch.Tensor:
            loss = original(self, model, batch)
            if step() - 1 not in steps or int(os.environ["RANK"]) != only_rank or not model.training:
                return loss
            if harm == "leap":
                return loss * 1e3
            if harm == "loss":
                return loss + math.nan
            return loss + infinite_slope(model)

        replace(Classification, "loss", harmed)

    return install
