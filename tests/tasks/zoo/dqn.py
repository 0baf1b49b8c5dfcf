"""DQN: a target network that is the trained one of some steps ago; a counter in a buffer says when."""

import torch
from shared import Task
from torch import nn
from torch.nn import functional as F

RECIPE = {"epochs": 2, "optim": {"name": "adamw", "lr": 0.01, "max_grad_norm": 1.0}}


class Values(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
        self.target = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)).requires_grad_(False)
        self.target.load_state_dict(self.online.state_dict())
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, state, after):
        if self.training:
            if self.calls % 2 == 0:
                with torch.no_grad():
                    for old, new in zip(self.target.parameters(), self.online.parameters(), strict=True):
                        old.copy_(new)
            self.calls += 1
        return self.online(state), self.target(after)


class DQN(Task):
    def rows(self, random):
        states = random.normal(size=(2, 24, 4))
        rows = {"state": states[0], "after": states[1], "action": random.integers(0, 2, 24)}
        return {**rows, "reward": random.normal(size=24)}

    def model(self):
        return Values()

    def loss(self, model, batch):
        f = batch.fields
        value, later = model(f["state"], f["after"])
        wanted = f["reward"] + 0.9 * later.max(1).values
        return F.smooth_l1_loss(value.gather(1, f["action"][:, None])[:, 0], wanted, reduction="none")
