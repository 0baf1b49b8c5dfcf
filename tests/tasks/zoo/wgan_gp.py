"""WGAN-GP: the critic's loss holds the norm of its own gradient, so that it is differentiated twice."""

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

RECIPE = {"epochs": 2}


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
        self.critic = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))


class WassersteinGAN:
    metric, mode, losses = "distance", "min", ("critic", "penalty", "generator")

    def data(self):
        point = np.random.default_rng(0).normal((1, -1), 0.3, (24, 2)).astype(np.float32)
        return {"point": point}, {"point": point[:10]}

    def model(self):
        return Halves()

    def loss(self, model, batch):
        real = batch.fields["point"]
        fake = model.generator(torch.randn(len(real), 4))
        share = torch.rand(len(real), 1)
        between = (share * real + (1 - share) * fake.detach()).requires_grad_()
        slope = torch.autograd.grad(model.critic(between).sum(), between, create_graph=True)[0]
        fixed = {name: weight.detach() for name, weight in model.critic.named_parameters()}
        return {
            "critic": model.critic(fake.detach()) - model.critic(real),
            "penalty": 10 * (slope.norm(dim=1) - 1).square(),
            "generator": -functional_call(model.critic, fixed, fake),
        }

    def measure(self, model, batch):
        fake = model.generator(torch.ones(len(batch.fields["point"]), 4))
        return {"distance": (fake - batch.fields["point"]).norm(dim=1)}
