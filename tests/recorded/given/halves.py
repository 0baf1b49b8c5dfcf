"""A custom task with an optimizer, a scheduler, two losses, buffers and random numbers of its own."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from trainer import means


class Halves(nn.Module):
    """A recurrent half behind one with BatchNorm, and buffers that each forward pass moves."""

    def __init__(self):
        super().__init__()
        self.front = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Dropout(0.3))
        self.back = nn.GRU(9, 7, batch_first=True)
        self.last = nn.Linear(7, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("center", torch.zeros(9))

    def forward(self, x):
        hidden = self.front(x)
        if self.training:
            self.seen += 1
            self.center.lerp_(hidden.detach().float().mean(0), 0.1)
        states, _ = self.back(hidden[:, None].expand(-1, 3, -1))
        return self.last(states[:, -1])


class Task:
    """Three clouds of points, seen through noise."""

    metric, mode = "worst", "min"
    losses = ("entropy", "size")
    watched = ("accuracy",)

    def data(self):
        random = np.random.default_rng(4)
        label = random.integers(0, 3, 70)
        point = (random.normal(0, 1, (70, 6)) + label[:, None]).astype(np.float32)
        samples = {"point": point, "label": label}
        return {k: v[:45] for k, v in samples.items()}, {k: v[45:] for k, v in samples.items()}

    def model(self):
        return Halves()

    def optimizer(self, model):
        back = [*model.back.parameters(), *model.last.parameters()]
        groups = [{"params": model.front.parameters(), "lr": 0.01}, {"params": back, "weight_decay": 0.1}]
        return torch.optim.NAdam(groups, lr=0.003)

    def scheduler(self, optimizer):
        warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
        waves = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4)
        return lr_scheduler.SequentialLR(optimizer, [warm, waves], [3])

    def loss(self, model, batch):
        point, label = batch.fields["point"], batch.fields["label"]
        logits = model(point + 0.1 * torch.randn_like(point))
        return {
            "entropy": F.cross_entropy(logits, label, reduction="none"),
            "size": 0.01 * logits.square().sum(1),
            "accuracy": logits.argmax(1) == label,
        }

    def measure(self, model, batch):
        logits, label = model(batch.fields["point"]), batch.fields["label"]
        each = F.cross_entropy(logits, label, reduction="none")
        return {"loss": each}

    def summarize(self, rows):
        return {"worst": rows["loss"].max(), **means(rows, "loss")}

    def inputs(self, batch):
        return (batch.fields["point"],)
