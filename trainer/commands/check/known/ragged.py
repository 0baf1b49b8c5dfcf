"""The task of `simple` with samples that count once to three times."""

from typing import Any

import numpy as np
from torch import nn

from trainer.commands.check.known import simple

RECIPE: dict[str, Any] = {
    "epochs": 2,
    "optim": {"lr": 0.02, "weight_decay": 0.2, "warmup_steps": 2, "max_grad_norm": 0.5},
}


class Ragged(simple.Simple):
    """Samples and how often each counts."""

    def data(self) -> Any:
        """Returns training and evaluation samples with their counts."""
        train, evaluation = super().data()
        for samples in (train, evaluation):
            samples["count"] = (np.arange(len(samples["x"])) % 3 + 1).astype(np.int64)
        return train, evaluation

    def loss(self, model: nn.Module, batch: Any) -> Any:
        """Returns squared errors and counts."""
        return super().loss(model, batch)[:, 0], batch.fields["count"]
