"""super_resolution of pytorch/examples: a loss of pixels, PSNR as the mean over batches."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


class SuperResolution:
    RECIPE = {
        "epochs": 2,
        "data": {"global_batch_size": 64, "micro_batch_size": 64, "last_batch": "weighted"},
        "evaluation": {"every": "1 epoch"},
    }
    metric, mode = "psnr", "max"
    factor, width, pixels = 3, 64, 84

    def data(self):  # here stand the crops of BSDS300, and the same made smaller
        random = np.random.default_rng(0)
        small = random.random((150, 1, self.pixels // self.factor, self.pixels // self.factor))
        large = small.repeat(self.factor, 2).repeat(self.factor, 3)
        pairs = {"small": small.astype(np.float32), "large": large.astype(np.float32)}
        return {n: a[:100] for n, a in pairs.items()}, {n: a[100:] for n, a in pairs.items()}

    def model(self):
        layers = (1, self.width), (self.width, self.width), (self.width, self.width // 2)
        convolutions = [
            *(nn.Conv2d(*one, size, padding=size // 2) for one, size in zip(layers, (5, 3, 3), strict=True)),
            nn.Conv2d(self.width // 2, self.factor**2, 3, padding=1),
        ]
        for number, one in enumerate(convolutions):
            nn.init.orthogonal_(one.weight, nn.init.calculate_gain("relu" if number < 3 else "linear"))
        one, two, three, four = convolutions
        return nn.Sequential(
            one, nn.ReLU(), two, nn.ReLU(), three, nn.ReLU(), four, nn.PixelShuffle(self.factor)
        )

    def optimizer(self, model):
        return torch.optim.Adam(model.parameters(), lr=0.01)

    def loss(self, model, batch):
        return F.mse_loss(model(batch["small"]), batch["large"], reduction="none").mean((1, 2, 3))

    def measure(self, model, batch):
        return {"mse": self.loss(model, batch)}

    def summarize(self, values):
        batches = values["mse"].split(10)  # the script's testBatchSize
        psnr = [-10 * one.mean().log10() for one in batches]
        return {"loss": values["mse"].mean(), "psnr": sum(psnr) / len(psnr)}
