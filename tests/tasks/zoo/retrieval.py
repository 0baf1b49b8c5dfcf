"""Retrieval with in-batch negatives: the other samples of a micro-batch are the wrong answers."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

RECIPE = {"epochs": 2, "optim": {"name": "adamw", "lr": 0.01}}


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.question, self.answer = nn.Linear(5, 4), nn.Linear(6, 4)
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, question, answer):
        one, other = F.normalize(self.question(question), dim=1), F.normalize(self.answer(answer), dim=1)
        return one @ other.T * self.log_scale.exp()


class Retrieval:
    def data(self):
        random = np.random.default_rng(0)
        rows = {
            n: random.normal(size=(24, d)).astype(np.float32) for n, d in (("question", 5), ("answer", 6))
        }
        return rows, {name: row[:10] for name, row in rows.items()}

    def model(self):
        return Towers()

    def loss(self, model, batch):
        logits = model(batch.fields["question"], batch.fields["answer"])
        right = torch.arange(len(logits))
        there = F.cross_entropy(logits, right, reduction="none")
        return (there + F.cross_entropy(logits.T, right, reduction="none")) / 2

    def measure(self, model, batch):
        return {"loss": self.loss(model, batch)}
