"""Diffusion: noise of a random strength is to be told; what is evaluated are the averaged weights."""

import torch
from shared import Task
from torch import nn
from torch.nn import functional as F

RECIPE = {"epochs": 2, "ema": {"decay": 0.9}, "optim": {"name": "adamw", "lr": 0.01}}


class Diffusion(Task):
    def rows(self, random):
        return {"x": random.normal((1, -1), 0.3, (24, 2))}

    def model(self):
        return nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Linear(16, 2))

    def loss(self, model, batch):
        x = batch.fields["x"]
        strength, noise = torch.rand(len(x), 1), torch.randn_like(x)
        told = model(torch.cat(((1 - strength).sqrt() * x + strength.sqrt() * noise, strength), dim=1))
        return F.mse_loss(told, noise, reduction="none").sum(1)

    def measure(self, model, batch):
        x = batch.fields["x"]
        told = model(torch.cat((0.5**0.5 * (x + 1), torch.full((len(x), 1), 0.5)), dim=1))
        return {"loss": F.mse_loss(told, torch.ones_like(x), reduction="none").sum(1)}
