"""siamese_network of pytorch/examples: pairs drawn for each sample, BatchNorm twice in a pass, Adadelta."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset


class Pairs(Dataset):
    """Two images: even samples of one class, odd ones of two."""

    def __init__(self, samples, dtype):  # here stands torchvision.datasets.MNIST
        generator = np.random.default_rng(0)
        label = np.arange(samples) % 10
        image = generator.normal(size=(10, 1, 28, 28))[label] + generator.normal(size=(samples, 1, 28, 28))
        self.image = image.astype(dtype)
        self.of = [np.flatnonzero(label == kind) for kind in range(10)]

    def __len__(self):
        return len(self.image)

    def __getitem__(self, sample):
        kind, other = random.sample(range(10), 2)
        if sample % 2 == 0:
            one, two = random.sample(range(len(self.of[kind])), 2)
            one, two = self.of[kind][one], self.of[kind][two]
        else:
            one, two = random.choice(self.of[kind]), random.choice(self.of[other])
        return self.image[one], self.image[two], self.image.dtype.type(sample % 2 == 0)


class SiameseNetwork(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.features = nn.Sequential(  # here stands torchvision.models.resnet18
            *(nn.Conv2d(1, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(True)),
            *(nn.Conv2d(width, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        )
        self.fc = nn.Sequential(nn.Linear(2 * width, 256), nn.ReLU(True), nn.Linear(256, 1), nn.Sigmoid())
        for part in self.fc[:3:2]:
            nn.init.xavier_uniform_(part.weight)
            nn.init.constant_(part.bias, 0.01)

    def forward(self, one, two):
        return self.fc(torch.cat((self.features(one), self.features(two)), 1))


class Siamese:
    RECIPE = {
        "epochs": 14,
        "data": {
            "global_batch_size": 64,
            "micro_batch_size": 64,
            "eval_batch_size": 1000,
            "last_batch": "weighted",
        },
        "evaluation": {"every": "1 epoch"},
    }
    metric = "accuracy"
    width, dtype = 64, np.float32

    def data(self):
        return Pairs(1000, self.dtype), Pairs(200, self.dtype)

    def model(self):
        return SiameseNetwork(self.width).to(torch.from_numpy(np.empty(0, self.dtype)).dtype)

    def optimizer(self, model):
        return torch.optim.Adadelta(model.parameters(), lr=1.0)

    def scheduler(self, optimizer, epoch_steps):
        return torch.optim.lr_scheduler.StepLR(optimizer, epoch_steps, gamma=0.7)

    def loss(self, model, batch):
        told = model(batch["0"], batch["1"])[:, 0]
        return F.binary_cross_entropy(told, batch["2"], reduction="none")

    def measure(self, model, batch):
        told, wanted = model(batch["0"], batch["1"])[:, 0], batch["2"]
        loss = F.binary_cross_entropy(told, wanted, reduction="none")
        return {"loss": loss, "accuracy": (told > 0.5) == (wanted > 0.5)}
