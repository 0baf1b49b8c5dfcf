"""Mixture of experts: each sample goes to one of them, so that some get no gradient in a step."""

from shared import Regression
from torch import nn

RECIPE = {"epochs": 2, "optim": {"name": "adamw", "lr": 0.01}, "parallel": {"reduction": "tree"}}


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 12), nn.ModuleList(nn.Linear(4, 1) for _ in range(12))

    def forward(self, x):
        share, chosen = self.gate(x).softmax(1).max(1)
        out = x.new_zeros(len(x), 1)
        for number in chosen.unique().tolist():
            out[chosen == number] = self.experts[number](x[chosen == number])
        return out * share[:, None]


class Mixture(Regression):
    def model(self):
        return Experts()
