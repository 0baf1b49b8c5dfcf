"""Distillation: a teacher that is frozen and in evaluation mode within the model; its BatchNorm stays."""

import torch
from shared import Task
from torch import nn
from torch.nn import functional as F


class School(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        self.teacher[1].running_mean.fill_(0.5)
        self.teacher.requires_grad_(False).eval()
        self.student = nn.Linear(6, 3)


class Distillation(Task):
    def model(self):
        return School()

    def loss(self, model, batch):
        with torch.no_grad():
            wanted = model.teacher(batch.fields["x"]).div(2).log_softmax(1)
        told = model.student(batch.fields["x"]).div(2).log_softmax(1)
        return 4 * F.kl_div(told, wanted, reduction="none", log_target=True).sum(1)
