"""WGAN-GP: the critic's loss holds the norm of its own gradient, so that it is differentiated twice."""

import torch
from shared import Halves, Points
from torch import nn
from torch.func import functional_call


class WassersteinGAN(Points):
    losses = ("critic", "penalty", "generator")

    def model(self):
        return Halves(nn.Tanh)

    def loss(self, model, batch):
        real = batch.fields["x"]
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
