"""torchvision's reference pipeline for ImageNet, on the CPU."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def transforms(side: int) -> Any:
    """PIL crop and flip, then normalized floats."""
    from torchvision import transforms as v1

    return v1.Compose(
        [v1.RandomResizedCrop(side), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize(MEAN, STD)]
    )


def load(folder: Path, work: Path, batch: int, side: int, workers: int) -> Callable[[], Iterator[int]]:
    """ImageFolder + PIL + v1 transforms + DataLoader; each call is an epoch and yields sizes of batches."""
    from torchvision.datasets import ImageFolder

    del work
    data = ImageFolder(str(folder), transforms(side))
    loader = DataLoader(
        data, batch, shuffle=True, num_workers=workers, persistent_workers=workers > 0, drop_last=True
    )
    return lambda: (len(labels) for _, labels in loader)
