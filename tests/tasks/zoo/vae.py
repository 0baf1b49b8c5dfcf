"""Variational autoencoder: noise is drawn in the forward pass, keyed by step and micro-batch."""

import torch
from shared import Task
from torch import nn
from torch.nn import functional as F


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(2, 6)

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
        return self.decoder(mean + noise * (log_variance / 2).exp()), mean, log_variance


class VAE(Task):
    losses = ("reconstruction", "divergence")

    def model(self):
        return Autoencoder()

    def loss(self, model, batch):
        x = batch.fields["x"]
        again, mean, log_variance = model(x)
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1) / 2
        return {"reconstruction": F.mse_loss(again, x, reduction="none").sum(1), "divergence": divergence}
