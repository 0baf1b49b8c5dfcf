"""Folders of a few small pictures, and a recipe that trains on them for long."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from trainer.config.recipe import Recipe


def make_folder(root: Path) -> Path:
    random = np.random.default_rng(0)
    for part, count in (("train", 6), ("val", 3)):
        for name in ("cat", "dog"):
            folder = root / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 256, (40 + number, 60, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return root


def write_pictures(root: Path) -> Path:
    """Writes 24 pictures of two classes, 20 of them to train on; returns the folder."""
    noise = np.random.default_rng(0)
    for number in range(24):
        file = root / ("val" if number % 6 == 5 else "train") / str(number // 6 % 2) / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise.integers(0, 255, (24, 24, 3), np.uint8)).save(file)
    return root


def recipe_of(pictures: Path, **data: Any) -> Recipe:
    """A run of 500,000 steps; data: further keys."""
    sizes = {"image_size": 16, "global_batch_size": 4, "micro_batch_size": 4, "eval_batch_size": 4}
    values = {
        "epochs": 100_000,
        "evaluation": {"every": "end"},
        "data": {"name": "folder", "path": str(pictures), **sizes, **data},
        "model": {"width": 4},
        "optim": {"schedule": "constant"},  # of so many steps another one takes its time to compute
        "parallel": {"threads": 1},
        "log": {"to": []},
    }
    return Recipe.model_validate(values)
