"""dcgan of pytorch/examples, its two halves in the same step: no turns, see docs/your-own-task.md."""

import numpy as np
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F


def deconvolution(inputs, outputs, *shape):
    return nn.Sequential(
        nn.ConvTranspose2d(inputs, outputs, *shape, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(True)
    )


def convolution(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 4, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.LeakyReLU(0.2, True)
    )


def start(part):
    if isinstance(part, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(part.weight, 0, 0.02)
    elif isinstance(part, nn.BatchNorm2d):
        nn.init.normal_(part.weight, 1, 0.02)


class Halves(nn.Module):
    def __init__(self, nz, ngf, ndf):
        super().__init__()
        self.generator = nn.Sequential(
            deconvolution(nz, ngf * 8, 4, 1, 0),
            *(deconvolution(ngf * 2 * n, ngf * n, 4, 2, 1) for n in (4, 2, 1)),
            nn.ConvTranspose2d(ngf, 3, 4, 2, 1, bias=False),
            nn.Tanh(),
        )
        self.critic = nn.Sequential(
            nn.Conv2d(3, ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, True),
            *(convolution(ndf * n, ndf * 2 * n) for n in (1, 2, 4)),
            nn.Conv2d(ndf * 8, 1, 4, 1, 0, bias=False),
            nn.Flatten(),
            nn.Sigmoid(),
        )
        self.apply(start)


class DCGAN:
    RECIPE = {"epochs": 25, "data": {"global_batch_size": 64, "micro_batch_size": 64}}
    metric, mode, losses = "fake", "max", ("critic", "generator")
    nz, ngf, ndf = 100, 64, 64

    def data(self):  # here stands torchvision.datasets.ImageFolder
        image = np.tanh(np.random.default_rng(0).normal(size=(256, 3, 64, 64))).astype(np.float32)
        return {"image": image}, {"image": image[:64]}

    def model(self):
        return Halves(self.nz, self.ngf, self.ndf)

    def optimizer(self, model):
        groups = [{"params": part.parameters()} for part in (model.critic, model.generator)]
        return torch.optim.Adam(groups, lr=0.0002, betas=(0.5, 0.999))

    def loss(self, model, batch):
        real = batch["image"]
        fake = model.generator(torch.randn(len(real), self.nz, 1, 1, device=real.device))
        told, denied = model.critic(real), model.critic(fake.detach())
        fixed = {name: weight.detach() for name, weight in model.critic.named_parameters()}
        judged = functional_call(model.critic, fixed, fake)  # the gradient goes through it, not to it
        return {"critic": bce(told, 1) + bce(denied, 0), "generator": bce(judged, 1)}

    def measure(self, model, batch):
        real = batch["image"]
        noise = torch.randn(len(real), self.nz, 1, 1, device=real.device)
        return {"real": model.critic(real), "fake": model.critic(model.generator(noise))}


def bce(told, label):
    return F.binary_cross_entropy(told, torch.full_like(told, label), reduction="none")
