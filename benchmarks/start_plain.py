"""Scripts of one step with the same work as a run of the bench `start`: `start_plain.py KIND [adamw]`.

Each imports what the trainer imports and reads its data the usual way. It updates by hand, as torch's
optimizers import its compiler, which the trainer avoids; with `adamw` it updates with torch's AdamW.

Kinds: `digits` (also for a custom task, whose model and data are as small), `folder`: a timm model on
photographs of the working folder.
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
from torch import Tensor, nn
from torch.nn import functional as F


def digits() -> tuple[nn.Module, Tensor, Tensor]:
    """Returns the model of the recipe `digits`, 64 images (64, 1, 8, 8) and their labels (64,)."""
    package = find_spec("trainer")
    assert package is not None and package.origin is not None
    rows = np.loadtxt(
        Path(package.origin).parent / "data" / "optdigits.csv.gz", delimiter=",", dtype=np.float32
    )
    model = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1)),
        *(nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )
    images = torch.from_numpy(rows[:64, :-1]).view(-1, 1, 8, 8) / 16
    return model, images, torch.from_numpy(rows[:64, -1]).long()


def folder() -> tuple[nn.Module, Tensor, Tensor]:
    """Returns timm's resnet18, 8 photographs (8, 3, 64, 64) and their labels (8,)."""
    import timm
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    cut = transforms.Compose([transforms.RandomResizedCrop(64), transforms.ToTensor()])
    photographs = ImageFolder("photographs/train", cut)
    images, labels = zip(*(photographs[number] for number in range(8)), strict=True)
    return timm.create_model("resnet18", num_classes=2), torch.stack(images), torch.tensor(labels)


torch.set_num_threads(1)
model, images, labels = {"digits": digits, "folder": folder}[sys.argv[1]]()
F.cross_entropy(model(images), labels).backward()
if sys.argv[2:]:
    torch.optim.AdamW(model.parameters(), lr=1e-3).step()
else:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data -= 0.1 * parameter.grad
