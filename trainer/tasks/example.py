"""A custom task: two spirals to classify. Put your data, model and loss in their place.

`trainer train FILE.py` trains it as it is; `--help-config` shows every key that RECIPE and --set may change.
"""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

RECIPE: dict[str, Any] = {
    "about": "two spirals",
    "epochs": 30,
    "evaluation": {"every": "5 epochs"},
    "data": {"global_batch_size": 64, "micro_batch_size": 32},
    "optim": {"name": "adamw", "lr": 0.01, "schedule": "cosine"},
}


class Spirals:
    """Two spirals as two classes."""

    metric = "accuracy"  # a metric of `measure`: the checkpoint where it is best is kept
    mode = "max"  # higher is better; "min" for an error

    def data(self) -> Any:
        """Returns the training and the evaluation set: arrays (samples, …) by name, or torch data sets."""
        random = np.random.default_rng(0)
        label = random.integers(0, 2, 2000)
        radius = np.sqrt(random.random(2000)) * 3
        angle = 2 * radius + np.pi * label
        point = np.stack((radius * np.cos(angle), radius * np.sin(angle)), 1) + random.normal(
            0, 0.1, (2000, 2)
        )
        both: dict[str, Any] = {"point": point.astype(np.float32), "label": label}
        return {n: a[:1600] for n, a in both.items()}, {n: a[1600:] for n, a in both.items()}

    def model(self) -> nn.Module:
        """Returns a new model, on the CPU: the trainer moves it."""
        return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

    def inputs(self, batch: Any) -> tuple[torch.Tensor, ...]:
        """Returns the model's inputs; `trainer export` calls it."""
        return (batch.fields["point"],)

    # The class may also have transforms(self): functions of a training sample; collate(self, items): for data
    # sets of torch; optimizer(self, model), scheduler(self, optimizer, steps): in place of RECIPE's optim;
    # losses = ("a", "b"): where `loss` gives a dict of them. See docs/your-own-task.md.

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Returns a value for each sample of a micro-batch; the trainer takes the mean over the step."""
        return F.cross_entropy(model(*self.inputs(batch)), batch.fields["label"], reduction="none")

    def measure(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """Returns values for each sample by name, numbers or bools."""
        logits, label = model(*self.inputs(batch)), batch.fields["label"]
        return {
            "loss": F.cross_entropy(logits, label, reduction="none"),
            "accuracy": logits.argmax(1) == label,
        }
