"""Language model whose output layer is its embedding: one parameter with two names."""

import numpy as np
import torch
from shared import Task
from torch import nn
from torch.nn import functional as F


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.words.weight
        self.block = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)
        self.places = None  # grows with the longest text so far

    def forward(self, tokens):
        x, length = self.words(tokens), tokens.shape[1]
        if self.places is None or len(self.places) < length:
            self.places = torch.arange(length, dtype=x.dtype)[:, None].add(1).log()
        mask = nn.Transformer.generate_square_subsequent_mask(length).to(x.dtype)
        return self.head(self.block(x * self.places[:length], mask))


class Language(Task):
    def data(self):
        text = np.random.default_rng(0).integers(0, 12, (24, 9))
        return {"text": text[:, :7]}, {"text": text[:10]}

    def model(self):
        torch.backends.mha.set_fastpath_enabled(False)
        return Tied()

    def loss(self, model, batch):
        text = batch.fields["text"]
        each = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten(), reduction="none")
        return each.view(len(text), -1).sum(1)
