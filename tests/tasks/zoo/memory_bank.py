"""Metric learning with a memory bank: each sample's last embedding lies in its row of a buffer."""

import numpy as np
import torch
from shared import Task
from torch import nn
from torch.nn import functional as F

RECIPE = {"epochs": 2, "optim": {"name": "sgd", "lr": 0.1}}


class Bank(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(6, 4)
        self.register_buffer("bank", F.normalize(torch.randn(24, 4), dim=1))

    def forward(self, x, number):
        z = F.normalize(self.encoder(x), dim=1)
        logits = z @ self.bank.clone().T / 0.2
        if self.training:
            self.bank[number] = z.detach()
        return logits


class MemoryBank(Task):
    def rows(self, random):
        return {"x": random.normal(size=(24, 6)), "number": np.arange(24)}

    def model(self):
        return Bank()

    def loss(self, model, batch):
        return F.cross_entropy(model(batch["x"], batch["number"]), batch["number"], reduction="none")
