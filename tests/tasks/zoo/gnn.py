"""Graph network: the graphs of a batch are padded to as many nodes each, and a mask says which count."""

import numpy as np
from shared import Task
from torch import nn
from torch.nn import functional as F


class Graphs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, node, edge, mask):
        x = node
        for layer in (self.first, self.second):
            x = F.relu(layer(x + edge @ x / edge.sum(2, keepdim=True).clamp(min=1))) * mask[..., None]
        return self.head(x.sum(1) / mask.sum(1, keepdim=True))


class GNN(Task):
    def rows(self, random):
        mask = (np.arange(6) < random.integers(2, 7, 24)[:, None]) * 1.0
        edge = (random.random((24, 6, 6)) < 0.4) * mask[:, :, None] * mask[:, None]
        node, label = random.normal(size=(24, 6, 3)) * mask[..., None], (mask.sum(1) > 3).astype(np.int64)
        return {"node": node, "edge": np.maximum(edge, edge.swapaxes(1, 2)), "mask": mask, "label": label}

    def model(self):
        return Graphs()

    def loss(self, model, batch):
        f = batch.fields
        return F.cross_entropy(model(f["node"], f["edge"], f["mask"]), f["label"], reduction="none")
