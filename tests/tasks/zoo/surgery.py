"""Gradient surgery: an optimizer of its own takes the mean out of each gradient, and keeps slow weights."""

import torch
from shared import Regression
from torch import nn

RECIPE = {"epochs": 2, "optim": {"max_grad_norm": 1.0}}


class Centered(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.clone())
                p.sub_(p.grad - p.grad.mean() if p.ndim > 1 else p.grad, alpha=group["lr"])
                slow.lerp_(p, 0.2)
                p.lerp_(slow, 0.1)


class Surgery(Regression):
    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def optimizer(self, model):
        return Centered(model.parameters())

    def scheduler(self, optimizer, steps):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
