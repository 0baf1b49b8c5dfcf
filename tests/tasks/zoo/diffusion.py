"""Diffusion: noise of a random strength is to be told; what is evaluated are the averaged weights."""

import torch
from shared import Task
from torch import nn
from torch.nn import functional as F

RECIPE = {"epochs": 2, "ema": {"decay": 0.9}, "optim": {"name": "adamw", "lr": 0.01}}


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Linear(16, 2))

    def forward(self, x, strength):
        return self.layers(torch.cat((x, strength), dim=1))


class Diffusion(Task):
    def rows(self, random):
        return {"x": random.normal((1, -1), 0.3, (24, 2))}

    def model(self):
        return Denoiser()

    def loss(self, model, batch):
        x = batch.fields["x"]
        strength, noise = torch.rand(len(x), 1), torch.randn_like(x)
        told = model((1 - strength).sqrt() * x + strength.sqrt() * noise, strength)
        return F.mse_loss(told, noise, reduction="none").sum(1)

    def measure(self, model, batch):
        x = batch.fields["x"]
        half = torch.full((len(x), 1), 0.5)
        told = model(0.5**0.5 * (x + 1), half)
        return {"loss": F.mse_loss(told, torch.ones_like(x), reduction="none").sum(1)}
