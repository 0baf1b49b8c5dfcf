"""Sequence to sequence with padding: the tokens that are no padding count."""

import numpy as np
from shared import Task
from torch import nn
from torch.nn import functional as F

RECIPE = {"epochs": 2, "optim": {"name": "adamw", "lr": 0.01, "max_grad_norm": 0.5}}


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, 8, padding_idx=0)
        self.encoder, self.decoder = nn.GRU(8, 8, batch_first=True), nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 10)

    def forward(self, source, target):
        _, state = self.encoder(self.words(source))
        return self.head(self.decoder(self.words(target[:, :-1]), state)[0])


class Seq2Seq(Task):
    def rows(self, random):
        length = random.integers(2, 7, 24)
        tokens = random.integers(1, 10, (2, 24, 7)) * (np.arange(7) < length[:, None])
        return {"source": tokens[0], "target": tokens[1]}

    def model(self):
        return Translator()

    def loss(self, model, batch):
        logits, wanted = model(batch["source"], batch["target"]), batch["target"][:, 1:]
        each = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=0, reduction="none")
        return each.view(wanted.shape), wanted > 0
