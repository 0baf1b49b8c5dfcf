"""GAN: both halves in one step, each loss reaches its own half, one optimizer with a group for each."""

import numpy as np
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

RECIPE = {"epochs": 2}


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
        self.critic = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))


class GAN:
    metric, mode, losses = "distance", "min", ("critic", "generator")

    def data(self):
        point = np.random.default_rng(0).normal((1, -1), 0.3, (24, 2)).astype(np.float32)
        return {"point": point}, {"point": point[:10]}

    def model(self):
        return Halves()

    def optimizer(self, model):
        critic = {"params": model.critic.parameters(), "lr": 0.002}
        return torch.optim.Adam([critic, {"params": model.generator.parameters()}], 0.001, (0.5, 0.99))

    def loss(self, model, batch):
        real = batch.fields["point"]
        fake = model.generator(torch.randn(len(real), 4))
        fixed = {name: weight.detach() for name, weight in model.critic.named_parameters()}
        told = F.softplus(-model.critic(real)) + F.softplus(model.critic(fake.detach()))
        return {"critic": told, "generator": F.softplus(-functional_call(model.critic, fixed, fake))}

    def measure(self, model, batch):
        fake = model.generator(torch.ones(len(batch.fields["point"]), 4))
        return {"distance": (fake - batch.fields["point"]).norm(dim=1)}
