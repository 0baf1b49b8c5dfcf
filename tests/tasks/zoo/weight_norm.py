"""Weight norm: direction and length of each row of a weight are parameters."""

import numpy as np
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

RECIPE = {"epochs": 2, "optim": {"name": "sgd", "lr": 0.05, "momentum": 0.9}}


class Lengths:
    def data(self):
        x = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)
        return {"x": x, "y": x[:, :1] ** 2}, {"x": x[:10], "y": x[:10, :1] ** 2}

    def model(self):
        return nn.Sequential(weight_norm(nn.Linear(4, 8)), nn.Tanh(), weight_norm(nn.Linear(8, 1)))

    def loss(self, model, batch):
        return F.mse_loss(model(batch.fields["x"]), batch.fields["y"], reduction="none")

    def measure(self, model, batch):
        return {"loss": self.loss(model, batch)}
