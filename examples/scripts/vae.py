"""vae of pytorch/examples: noise in the forward pass, two losses by name, a picture after each epoch."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


def digits(samples):  # here stands torchvision.datasets.MNIST
    random = np.random.default_rng(0)
    kinds = random.random((10, 784))
    return {"image": (kinds[random.integers(0, 10, samples)] ** 2).astype(np.float32)}


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(784, 400), nn.Linear(400, 20), nn.Linear(400, 20)
        self.fc3, self.fc4 = nn.Linear(20, 400), nn.Linear(400, 784)

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        hidden = F.relu(self.fc1(x))
        mean, log_variance = self.fc21(hidden), self.fc22(hidden)
        std = (0.5 * log_variance).exp()
        return self.decode(mean + torch.randn_like(std) * std), mean, log_variance


class Digits:
    RECIPE = {
        "epochs": 10,
        "data": {"global_batch_size": 128, "micro_batch_size": 128},
        "evaluation": {"every": "1 epoch"},
    }
    losses = ("reconstruction", "divergence")

    def data(self):
        return digits(1280), digits(256)

    def model(self):
        return VAE()

    def optimizer(self, model):
        # The script's loss is a batch's sum: for Adam that is the mean with a smaller eps.
        return torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-8 / 128)

    def loss(self, model, batch):
        again, mean, log_variance = model(batch["image"])
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1)
        each = F.binary_cross_entropy(again, batch["image"], reduction="none")
        return {"reconstruction": each.sum(1), "divergence": divergence}

    def measure(self, model, batch):
        return {"loss": sum(self.loss(model, batch).values())}


class Samples:
    """In place of the script's results/sample_EPOCH.png."""

    def after_evaluation(self, step, metrics, model):
        z = torch.randn(64, 20, generator=torch.Generator().manual_seed(step))
        rows = model.decode(z).view(8, 8, 28, 28).transpose(1, 2).reshape(224, 224)
        return {"samples": (255 * rows).to(torch.uint8)}


hooks = [Samples]
