"""Energies and forces: the forces are minus the gradient of the energy, in the loss and in the metrics."""

import torch
from shared import Task
from torch import nn
from torch.nn import functional as F


class Forces(Task):
    metric, mode, losses = "force", "min", ("energy", "force")

    def rows(self, random):
        place = random.normal(size=(24, 3))
        return {"place": place, "energy": (place**2).sum(1) / 2, "force": -place}

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
