"""Weight norm: direction and length of each row of a weight are parameters."""

from shared import Regression
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

RECIPE = {"epochs": 2, "optim": {"name": "sgd", "lr": 0.05, "momentum": 0.9}}


class Lengths(Regression):
    def model(self):
        return nn.Sequential(weight_norm(nn.Linear(4, 8)), nn.Tanh(), weight_norm(nn.Linear(8, 1)))
