"""Spectral norm: a training forward pass makes a step of power iteration in two buffers."""

import numpy as np
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

RECIPE = {"epochs": 2, "optim": {"name": "adamw", "lr": 0.01}}


class Lipschitz:
    def data(self):
        x = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)
        return {"x": x, "y": x[:, :1] ** 2}, {"x": x[:10], "y": x[:10, :1] ** 2}

    def model(self):
        return nn.Sequential(spectral_norm(nn.Linear(4, 8)), nn.ReLU(), spectral_norm(nn.Linear(8, 1)))

    def loss(self, model, batch):
        return F.mse_loss(model(batch.fields["x"]), batch.fields["y"], reduction="none")

    def measure(self, model, batch):
        return {"loss": self.loss(model, batch)}
