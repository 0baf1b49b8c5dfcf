"""A custom task in which some samples give a loss that isn't finite."""

import numpy as np
from torch import nn
from torch.nn import functional as F

SPOILED = {5: np.nan, 31: np.inf}  # by sample: a factor of its loss


class Net(nn.Module):
    """Layers with BatchNorm and dropout."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(12)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(12, 3)

    def forward(self, x):
        return self.last(self.drop(F.relu(self.norm(self.first(x)))))


class Spoiled:
    """Three clouds of points."""

    metric = "accuracy"

    def data(self):
        random = np.random.default_rng(3)
        label = random.integers(0, 3, 80)
        point = (random.normal(0, 1, (80, 6)) + label[:, None]).astype(np.float32)
        factor = np.ones(80, np.float32)
        for sample, value in SPOILED.items():
            factor[sample] = value
        samples = {"point": point, "label": label, "factor": factor}
        return {k: v[:50] for k, v in samples.items()}, {k: v[50:] for k, v in samples.items()}

    def model(self):
        return Net()

    def loss(self, model, batch):
        each = F.cross_entropy(model(batch.fields["point"]), batch.fields["label"], reduction="none")
        return each * batch.fields["factor"]

    def measure(self, model, batch):
        logits, label = model(batch.fields["point"]), batch.fields["label"]
        right = logits.argmax(1) == label
        return {"loss": F.cross_entropy(logits, label, reduction="none"), "accuracy": right}

    def inputs(self, batch):
        return (batch.fields["point"],)
