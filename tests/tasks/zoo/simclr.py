"""SimCLR: two noisy views of each sample, told apart from all other views of the micro-batch."""

import torch
from shared import Task
from torch import nn
from torch.nn import functional as F


class SimCLR(Task):
    def model(self):
        return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

    def loss(self, model, batch):
        views = batch.fields["x"].repeat(2, 1)
        views = views + 0.1 * torch.randn_like(views) if model.training else views
        z = F.normalize(model(views), dim=1)
        alike = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e4)
        other = torch.arange(len(z)).roll(len(z) // 2)
        return F.cross_entropy(alike, other, reduction="none").view(2, -1).mean(0)
