"""Quantization-aware training: values are rounded in the forward pass, gradients go straight through."""

import torch
from shared import Regression
from torch import nn


class Rounded(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.tensor(1.0))

    def forward(self, x):
        if self.training:
            self.largest.lerp_(x.detach().abs().max(), 0.1)
        step = self.largest.clone() / 127
        return x + ((x / step).round().clamp(-127, 127) * step - x).detach()


class Quantization(Regression):
    def model(self):
        return nn.Sequential(Rounded(), nn.Linear(4, 8), nn.ReLU(), Rounded(), nn.Linear(8, 1))
