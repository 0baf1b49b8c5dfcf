"""Quantization-aware training: values are rounded in the forward pass, gradients go straight through."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

RECIPE = {"epochs": 2, "optim": {"name": "adamw", "lr": 0.01}}


class Rounded(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.tensor(1.0))

    def forward(self, x):
        if self.training:
            self.largest.lerp_(x.detach().abs().max(), 0.1)
        step = self.largest.clone() / 127
        return x + ((x / step).round().clamp(-127, 127) * step - x).detach()


class Quantization:
    def data(self):
        x = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)
        return {"x": x, "y": x[:, :1] ** 2}, {"x": x[:10], "y": x[:10, :1] ** 2}

    def model(self):
        return nn.Sequential(Rounded(), nn.Linear(4, 8), nn.ReLU(), Rounded(), nn.Linear(8, 1))

    def loss(self, model, batch):
        return F.mse_loss(model(batch.fields["x"]), batch.fields["y"], reduction="none")

    def measure(self, model, batch):
        return {"loss": self.loss(model, batch)}
