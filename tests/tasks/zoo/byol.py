"""BYOL and DINO: a frozen teacher that each training forward pass moves towards the student."""

import torch
from shared import Task
from torch import nn
from torch.nn import functional as F


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 8), nn.Linear(6, 8).requires_grad_(False)
        self.predictor = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
        noise = 0.1 * torch.randn_like(x) if self.training else 0
        return self.predictor(self.student(x + noise)), self.teacher(x)


class BYOL(Task):
    def model(self):
        return Pair()

    def loss(self, model, batch):
        told, wanted = model(batch.fields["x"])
        return 2 - 2 * F.cosine_similarity(told, wanted, dim=1)
