"""Autoencoder with tied weights: the decoder's parameter is the encoder's, seen transposed, in one memory."""

from shared import Task
from torch import nn
from torch.nn import functional as F

RECIPE = {"epochs": 2, "optim": {"name": "sgd", "lr": 0.02, "momentum": 0.0}}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 3), nn.Linear(3, 6)
        self.decoder.weight = nn.Parameter(self.encoder.weight.t())

    def forward(self, x):
        return self.decoder(self.encoder(x).tanh())


class Autoencoder(Task):
    def model(self):
        return Tied()

    def loss(self, model, batch):
        return F.mse_loss(model(batch.fields["x"]), batch.fields["x"], reduction="none").sum(1)
