"""Several tasks whose weights are learned (Kendall et al., 2018): parameters of the model in the loss."""

import torch
from shared import Task
from torch import nn
from torch.nn import functional as F


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.kind, self.size = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 1)
        self.log_variance = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        hidden = F.relu(self.body(x))
        return self.kind(hidden), self.size(hidden)[:, 0]


class MultiTask(Task):
    losses = ("kind", "size")

    def rows(self, random):
        x = random.normal(size=(24, 4))
        return {"x": x, "kind": random.integers(0, 3, 24), "size": x.sum(1)}

    def model(self):
        return Heads()

    def loss(self, model, batch):
        (kind, size), (one, two) = model(batch["x"]), model.log_variance
        kind = F.cross_entropy(kind, batch["kind"], reduction="none")
        size = F.mse_loss(size, batch["size"], reduction="none")
        return {"kind": kind * (-one).exp() + one / 2, "size": size * (-two).exp() + two / 2}

    def measure(self, model, batch):
        told, kind = model(batch.fields["x"])[0].argmax(1), batch.fields["kind"]
        # By name in any order: here the rarest kind of the micro-batch first.
        rarest = kind.bincount(minlength=3).argsort().tolist()
        right = {f"right_{k}": (told == k) & (kind == k) for k in rarest}
        return {**right, "loss": sum(self.loss(model, batch).values())}
