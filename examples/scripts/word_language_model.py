"""word_language_model of pytorch/examples: an LSTM whose state goes on from chunk to chunk of the text."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


def chunks(text, columns, bptt):
    """Cuts a text into columns, and these into chunks, the samples: first the first of each column."""
    rows = (len(text) // columns - 1) // -bptt * -bptt + 1  # the last chunk is shorter: -1 is no word
    table = np.full((columns, rows), -1)
    table[:, : len(text) // columns] = text[: len(text) // columns * columns].reshape(columns, -1)
    cut = {"word": table[:, :-1], "next": table[:, 1:]}
    cut = {n: t.reshape(columns, -1, bptt).swapaxes(0, 1).reshape(-1, bptt) for n, t in cut.items()}
    number = np.arange(len(cut["word"]))
    return {**cut, "column": number % columns, "first": number < columns}


class RNNModel(nn.Module):
    def __init__(self, words, size, layers, columns, dropout=0.2):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder, self.decoder = nn.Embedding(words, size), nn.Linear(size, words)
        self.rnn = nn.LSTM(size, size, layers, dropout=dropout, batch_first=True)
        self.register_buffer("state", torch.zeros(2, layers, columns, size))
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, word, column, first):
        hidden = self.state[:, :, column] * ~first[:, None]
        out, hidden = self.rnn(self.drop(self.encoder(word.clamp(min=0))), tuple(hidden))
        self.state[:, :, column] = torch.stack(hidden).detach()
        return self.decoder(self.drop(out))


class WordLanguageModel:
    RECIPE = {
        "epochs": 40,
        "data": {
            "global_batch_size": 20,  # a step has the same chunk of all columns
            "micro_batch_size": 20,
            "eval_batch_size": 20,
            "shuffle": False,
        },
        "optim": {"max_grad_norm": 0.25},
        "evaluation": {"every": "1 epoch"},
    }
    metric, mode = "perplexity", "min"
    words, size, columns, bptt = 1000, 200, 20, 35

    def data(self):  # here stand the numbers of the words of train.txt and valid.txt
        text = np.random.default_rng(0).integers(0, self.words, 6000) // 2
        return chunks(text[:5000], self.columns, self.bptt), chunks(text[5000:], self.columns, self.bptt)

    def model(self):
        return RNNModel(self.words, self.size, 2, self.columns)

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=20)

    def loss(self, model, batch):
        told = model(batch["word"], batch["column"], batch["first"]).transpose(1, 2)
        return F.cross_entropy(told, batch["next"], reduction="none", ignore_index=-1), batch["next"] >= 0

    def measure(self, model, batch):
        return {"nats": self.loss(model, batch)}

    def summarize(self, values):
        nats, counts = values["nats"]
        return {"loss": nats[counts].mean(), "perplexity": nats[counts].mean().exp()}
