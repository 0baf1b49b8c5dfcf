"""CTC: sequences and targets of other lengths in each sample, which come as fields."""

from shared import Task
from torch import nn
from torch.nn import functional as F


class Listener(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent, self.head = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 5)

    def forward(self, sound):
        return self.head(self.recurrent(sound)[0]).log_softmax(2)


class CTC(Task):
    def rows(self, random):
        rows = {"sound": random.normal(size=(24, 12, 4)), "target": random.integers(1, 5, (24, 4))}
        return {**rows, "frames": random.integers(9, 13, 24), "length": random.integers(1, 5, 24)}

    def model(self):
        return Listener()

    def loss(self, model, batch):
        f = batch.fields
        told = model(f["sound"]).transpose(0, 1)
        return F.ctc_loss(told, f["target"], f["frames"], f["length"], reduction="none", zero_infinity=True)
