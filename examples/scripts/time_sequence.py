"""time_sequence_prediction of pytorch/examples in float64, by Adam in place of LBFGS."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


class Sequence(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.lstm1, self.lstm2 = nn.LSTMCell(1, size), nn.LSTMCell(size, size)
        self.linear = nn.Linear(size, 1)

    def forward(self, wave, future=0):
        one, two, told = None, None, []
        for at in range(wave.shape[1] + future):
            value = wave[:, at : at + 1] if at < wave.shape[1] else told[-1]
            one = self.lstm1(value, one)
            two = self.lstm2(one[0], two)
            told.append(self.linear(two[0]))
        return torch.cat(told, 1)


class TimeSequence:
    RECIPE = {
        "max_steps": 300,
        "data": {"global_batch_size": 97, "micro_batch_size": 97},  # all samples
        "evaluation": {"every": "20 steps"},
    }
    size, length, future = 51, 1000, 1000

    def data(self):
        shift = np.random.default_rng(2).integers(-80, 80, (100, 1))
        wave = np.sin((np.arange(self.length) + shift) / 20)
        return {"wave": wave[3:]}, {"wave": wave[:3]}

    def model(self):
        return Sequence(self.size).double()

    def optimizer(self, model):
        return torch.optim.Adam(model.parameters(), lr=0.01)

    def loss(self, model, batch):
        wave = batch["wave"]
        return F.mse_loss(model(wave[:, :-1]), wave[:, 1:], reduction="none").mean(1)

    def measure(self, model, batch):
        return {"loss": self.loss(model, batch)}
