"""A custom task: what comes next in a signal. `trainer train forecast.py`."""

from pathlib import Path

import numpy as np
import torch
from signal_data import FILE, FUTURE, PAST, Windows
from torch import nn
from torch.nn import functional as F

RECIPE = {
    "about": "the next 16 values of a signal",
    "epochs": 5,
    "evaluation": {"every": "1 epoch"},
    "data": {"global_batch_size": 64, "micro_batch_size": 32},
    "optim": {"name": "adamw", "lr": 0.003, "schedule": "cosine"},
}


class Forecast:
    """What is learned."""

    metric = "rmse"  # the checkpoint where it is best is kept
    mode = "min"
    losses = ("near", "far")  # what `loss` gives; their sum is trained, and rows have loss/near and loss/far

    def data(self):
        """What to learn from, and what to measure on: the last fifth."""
        count = len(np.load(FILE, mmap_mode="r"))
        return Windows(0, count * 4 // 5), Windows(count * 4 // 5, count)

    def model(self):
        """A new model, on the CPU: the trainer moves it."""
        return nn.Sequential(
            nn.Linear(PAST, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, FUTURE)
        )

    def inputs(self, batch):
        """What the model is called with; `trainer export` asks for it."""
        return (batch.fields["past"],)

    def loss(self, model, batch):
        """Each a value for each sample, (n,): its squared errors."""
        predicted, future, half = model(*self.inputs(batch)), batch.fields["future"], FUTURE // 2
        near = F.mse_loss(predicted[:, :half], future[:, :half], reduction="none").sum(1) / FUTURE
        far = F.mse_loss(predicted[:, half:], future[:, half:], reduction="none").sum(1) / FUTURE
        return {"near": near, "far": far}

    def measure(self, model, batch):
        """Two errors of each sample, (n, 2), which `summarize` gets."""
        past, future = batch.fields["past"], batch.fields["future"]
        predicted = (model(past) - future).square().mean(1)
        repeated = (past[:, -1:] - future).square().mean(1)  # as if the last value stayed
        return {"errors": torch.stack((predicted, repeated), 1)}

    def summarize(self, rows):
        """Figures from the values of all samples."""
        predicted, repeated = rows["errors"].mean(0).sqrt().tolist()
        return {"rmse": predicted, "rmse_of_repeating": repeated}


class Notes:
    """Hooks: what is done after an evaluation, and once a checkpoint is whole on the disk."""

    def after_evaluation(self, step, metrics):
        """Adds a line to notes.txt."""
        with Path("notes.txt").open("a") as file:
            print(f"step {step}: rmse {metrics['rmse']:.4f}", file=file)

    def after_checkpoint(self, step, folder):
        """Says where it is; it could be copied elsewhere."""
        print(f"step {step} is in {folder}")


hooks = [Notes]
