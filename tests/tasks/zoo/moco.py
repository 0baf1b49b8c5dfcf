"""MoCo: keys by a frozen encoder that follows the trained one, and a queue of them in a buffer."""

import torch
from shared import Task
from torch import nn
from torch.nn import functional as F

RECIPE = {"epochs": 2, "optim": {"name": "sgd", "lr": 0.05}}


class Contrast(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(6, 4), nn.Linear(6, 4).requires_grad_(False)
        self.key.load_state_dict(self.query.state_dict())
        self.register_buffer("queue", F.normalize(torch.randn(16, 4), dim=1))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
        query, key = F.normalize(self.query(x), dim=1), F.normalize(self.key(x), dim=1)
        logits = torch.cat(((query * key).sum(1, keepdim=True), query @ self.queue.clone().T), dim=1)
        if self.training:
            self.queue.copy_(torch.cat((key, self.queue))[:16])
        return logits / 0.2


class MoCo(Task):
    def model(self):
        return Contrast()

    def loss(self, model, batch):
        logits = model(batch.fields["x"])
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long), reduction="none")
