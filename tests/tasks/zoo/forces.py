"""Energies and forces: the forces are minus the gradient of the energy, in the loss and in the metrics."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

RECIPE = {"epochs": 2, "optim": {"name": "adamw", "lr": 0.01}}


class Forces:
    metric, mode, losses = "force", "min", ("energy", "force")

    def data(self):
        place = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
        rows = {"place": place, "energy": (place**2).sum(1) / 2, "force": -place}
        return rows, {name: row[:10] for name, row in rows.items()}

    def model(self):
        return nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Linear(16, 1))

    def loss(self, model, batch):
        f = batch.fields
        place = f["place"].clone().requires_grad_()
        energy = model(place)[:, 0]
        force = -torch.autograd.grad(energy.sum(), place, create_graph=model.training)[0]
        wrong = F.mse_loss(force, f["force"], reduction="none").sum(1)
        return {"energy": F.mse_loss(energy, f["energy"], reduction="none"), "force": wrong}

    def measure(self, model, batch):
        with torch.enable_grad():
            return {name: value.detach() for name, value in self.loss(model, batch).items()}
