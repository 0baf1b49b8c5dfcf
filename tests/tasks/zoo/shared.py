"""Parts of these tasks: 24 samples, the first ten measured by the loss; a regression; the halves of a GAN."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


class Task:
    def rows(self, random):
        return {"x": random.normal(size=(24, 6))}

    def data(self):
        rows = self.rows(np.random.default_rng(0))
        rows = {name: row.astype(np.float32) if row.dtype == float else row for name, row in rows.items()}
        return rows, {name: row[:10] for name, row in rows.items()}

    def measure(self, model, batch):
        loss = self.loss(model, batch)
        return {"loss": sum(loss.values()) if isinstance(loss, dict) else loss}


class Regression(Task):
    def rows(self, random):
        x = random.normal(size=(24, 4))
        return {"x": x, "y": x[:, :1] ** 2}

    def loss(self, model, batch):
        return F.mse_loss(model(batch.fields["x"]), batch.fields["y"], reduction="none")


class Halves(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), activation(), nn.Linear(16, 2))
        self.critic = nn.Sequential(nn.Linear(2, 16), activation(), nn.Linear(16, 1))


class Points(Task):
    metric, mode = "distance", "min"

    def rows(self, random):
        return {"x": random.normal((1, -1), 0.3, (24, 2))}

    def measure(self, model, batch):
        fake = model.generator(torch.ones(len(batch.fields["x"]), 4))
        return {"distance": (fake - batch.fields["x"]).norm(dim=1)}
