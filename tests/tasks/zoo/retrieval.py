"""Retrieval with in-batch negatives: the other samples of a micro-batch are the wrong answers."""

import torch
from shared import Task
from torch import nn
from torch.nn import functional as F


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.question, self.answer = nn.Linear(5, 4), nn.Linear(6, 4)
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, question, answer):
        one, other = F.normalize(self.question(question), dim=1), F.normalize(self.answer(answer), dim=1)
        return one @ other.T * self.log_scale.exp()


class Retrieval(Task):
    def rows(self, random):
        return {name: random.normal(size=(24, n)) for name, n in (("question", 5), ("answer", 6))}

    def model(self):
        return Towers()

    def loss(self, model, batch):
        logits = model(batch.fields["question"], batch.fields["answer"])
        right = torch.arange(len(logits))
        there = F.cross_entropy(logits, right, reduction="none")
        return (there + F.cross_entropy(logits.T, right, reduction="none")) / 2
