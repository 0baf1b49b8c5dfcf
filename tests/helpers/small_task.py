"""A custom task that tests break."""

from typing import Any

import numpy as np
from torch import nn
from torch.nn import functional as F

# For `fit`: two steps, with a row each.
SETTINGS: dict[str, Any] = {"epochs": 1, "data.global_batch_size": 5, "data.micro_batch_size": 5}
SETTINGS |= {"log.to": ["jsonl"], "log.every": 1, "parallel.threads": 1}


class Small:
    """Ten samples of two numbers; what is wrong with it is put in by a test."""

    def data(self) -> Any:
        x = np.arange(20, dtype=np.float32).reshape(10, 2) / 10
        return {"x": x, "y": x[:, :1]}, {"x": x[:5], "y": x[:5, :1]}

    def model(self) -> Any:
        return nn.Linear(2, 1)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return F.mse_loss(model(batch.fields["x"]), batch.fields["y"], reduction="none")

    def measure(self, model: nn.Module, batch: Any) -> Any:
        return {"loss": self.loss(model, batch)}
