"""mnist of pytorch/examples: dropout, Adadelta, a rate that falls after each epoch."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


def digits(samples):  # here stands torchvision.datasets.MNIST with its transform
    random = np.random.default_rng(0)
    kinds, label = random.normal(size=(10, 1, 28, 28)), random.integers(0, 10, samples)
    image = kinds[label] + random.normal(size=(samples, 1, 28, 28))
    return {"image": image.astype(np.float32), "label": label}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout1(F.max_pool2d(x, 2)).flatten(1)
        return self.fc2(self.dropout2(F.relu(self.fc1(x)))).log_softmax(1)


class MNIST:
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

    def data(self):
        return digits(1000), digits(200)

    def model(self):
        return Net()

    def optimizer(self, model):
        return torch.optim.Adadelta(model.parameters(), lr=1.0)

    def scheduler(self, optimizer, epoch_steps):
        return torch.optim.lr_scheduler.StepLR(optimizer, epoch_steps, gamma=0.7)

    def loss(self, model, batch):
        return F.nll_loss(model(batch["image"]), batch["label"], reduction="none")

    def measure(self, model, batch):
        log_p, label = model(batch["image"]), batch["label"]
        return {"loss": F.nll_loss(log_p, label, reduction="none"), "accuracy": log_p.argmax(1) == label}
