"""Mean teacher: labels for some samples, and for all of them agreement with a slow copy of the network."""

from shared import Task
from torch import nn
from torch.nn import functional as F


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.fast, self.slow = nn.Linear(4, 3), nn.Linear(4, 3).requires_grad_(False)

    def forward(self, x):
        if self.training:
            self.slow.weight.data.mul_(0.9).add_(self.fast.weight.data, alpha=0.1)
            self.slow.bias.data.mul_(0.9).add_(self.fast.bias.data, alpha=0.1)
        return self.fast(F.dropout(x, 0.2, self.training)), self.slow(x)


class MeanTeacher(Task):
    losses = ("labeled", "agreement")

    def rows(self, random):
        return {"x": random.normal(size=(24, 4)), "y": random.integers(-1, 3, 24)}

    def model(self):
        return Both()

    def loss(self, model, batch):
        told, wanted = model(batch.fields["x"])
        labeled = F.cross_entropy(told, batch.fields["y"], ignore_index=-1, reduction="none")
        return {"labeled": labeled, "agreement": F.mse_loss(told, wanted.detach(), reduction="none").sum(1)}
