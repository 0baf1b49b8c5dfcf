"""The task of `simple` with one to three items in each sample."""

from typing import Any

import numpy as np

from trainer.commands.check.known import simple

RECIPE: dict[str, Any] = {
    "epochs": 2,
    "optim": {"lr": 0.02, "weight_decay": 0.2, "warmup_steps": 2, "max_grad_norm": 0.5},
}


class Ragged(simple.Simple):
    """Samples whose error counts once for each item."""

    def data(self) -> Any:
        """Returns training and evaluation samples with `num_items`."""
        train, evaluation = super().data()
        for samples in (train, evaluation):
            samples["num_items"] = (np.arange(len(samples["x"])) % 3 + 1).astype(np.int64)
        return train, evaluation
