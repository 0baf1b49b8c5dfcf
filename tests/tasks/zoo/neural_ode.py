"""Neural ODE: one layer is applied again and again, by Runge and Kutta's steps."""

from shared import Task
from torch import nn
from torch.nn import functional as F


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.speed = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, y):
        for _ in range(4):
            a = self.speed(y)
            b = self.speed(y + a / 8)
            c = self.speed(y + b / 8)
            y = y + (a + 2 * b + 2 * c + self.speed(y + c / 4)) / 24
        return y


class NeuralODE(Task):
    def rows(self, random):
        start = random.normal(size=(24, 2))
        return {"start": start, "end": start @ [[0.5, -0.8], [0.8, 0.5]]}

    def model(self):
        return Flow()

    def loss(self, model, batch):
        return F.mse_loss(model(batch.fields["start"]), batch.fields["end"], reduction="none").sum(1)
