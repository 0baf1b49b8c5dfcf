"""Siamese network with a triplet loss: one encoder with BatchNorm runs three times in a forward pass."""

from shared import Task
from torch import nn
from torch.nn import functional as F

RECIPE = {"epochs": 2, "optim": {"name": "sgd", "lr": 0.05, "momentum": 0.9}}


class Siamese(Task):
    def rows(self, random):
        anchor, near, far = random.normal(size=(3, 24, 5))
        return {"anchor": anchor, "near": anchor + 0.1 * near, "far": 2 + far}

    def model(self):
        return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    def loss(self, model, batch):
        three = (model(batch.fields[name]) for name in ("anchor", "near", "far"))
        return F.triplet_margin_loss(*three, reduction="none")
