"""GAN: both halves in one step, each loss reaches its own half, one optimizer with a group for each."""

import torch
from shared import Halves, Points
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F


class GAN(Points):
    losses = ("critic", "generator")

    def model(self):
        return Halves(nn.ReLU)

    def optimizer(self, model):
        critic = {"params": model.critic.parameters(), "lr": 0.002}
        return torch.optim.Adam([critic, {"params": model.generator.parameters()}], 0.001, (0.5, 0.99))

    def loss(self, model, batch):
        real = batch.fields["x"]
        fake = model.generator(torch.randn(len(real), 4))
        fixed = {name: weight.detach() for name, weight in model.critic.named_parameters()}
        told = F.softplus(-model.critic(real)) + F.softplus(model.critic(fake.detach()))
        return {"critic": told, "generator": F.softplus(-functional_call(model.critic, fixed, fake))}
