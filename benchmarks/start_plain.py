"""A script of one step with the same work as `trainer train digits`, for comparison in the bench `start`.

With a word after it, it updates by hand: torch's optimizers import its compiler, which the trainer avoids.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pydantic  # noqa: F401
import safetensors.torch  # noqa: F401
import torch
import yaml  # noqa: F401
from tensorboard.compat.proto.event_pb2 import Event  # noqa: F401
from tensorboard.summary.writer.record_writer import RecordWriter  # noqa: F401
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(1)
package = find_spec("trainer")
assert package is not None and package.origin is not None
digits = Path(package.origin).parent / "data" / "optdigits.csv.gz"
rows = np.loadtxt(digits, delimiter=",", dtype=np.float32)
images = torch.from_numpy(rows[:, :-1]).view(-1, 1, 8, 8) / 16
labels = torch.from_numpy(rows[:, -1]).long()
model = nn.Sequential(
    *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1)),
    *(nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
)
F.cross_entropy(model(images[:64]), labels[:64]).backward()
if sys.argv[1:]:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data -= 0.1 * parameter.grad
else:
    torch.optim.AdamW(model.parameters(), lr=1e-3).step()
