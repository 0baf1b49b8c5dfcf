"""Recipes that are slowed, and the data that they read: made once, in a folder of this machine."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from benchmarks.photographs import originals, write_photographs
from tests.helpers.remote import write_pack

_RESNET = {"name": "small_resnet", "width": 16, "blocks": [1, 1]}
_OPTIM = {"name": "adamw", "lr": 0.001, "schedule": "cosine", "weight_decay": 0.05}
_LOG = {"every": 5, "to": ["jsonl"]}
# Every recipe is a few seconds long on two CPU cores; a case changes what it must.
RECIPES: Mapping[str, Mapping[str, Any]] = {
    # Resident: the data lies in memory, there is no loader.
    "digits": {
        "data": {"name": "digits", "global_batch_size": 64, "micro_batch_size": 64, "augment": "affine"},
        "model": {**_RESNET, "width": 24},
        "optim": {**_OPTIM, "max_grad_norm": 1.0},
        "ema": {"decay": 0.99},
    },
    # A folder of JPEGs, 500 x 375, decoded as they are needed.
    "photos": {
        "data": {"name": "folder", "path": "photos", "image_size": 64, "augment": "flip"},
        "model": {**_RESNET, "width": 32, "blocks": [1, 1, 1]},
        "optim": {**_OPTIM, "name": "sgd"},
    },
    # The same in a pack, shrunk.
    "pack": {
        "data": {"name": "pack", "path": "packed", "image_size": 48, "augment": "flip"},
        "model": {**_RESNET, "blocks": [1, 1, 1]},
        "optim": _OPTIM,
    },
    # The same in tar shards.
    "shards": {
        "data": {"name": "shards", "path": "shards", "image_size": 64},
        "model": {**_RESNET, "width": 24, "blocks": [1, 1, 1]},
        "optim": {**_OPTIM, "max_grad_norm": 1.0},
    },
    # JPEGs as a camera makes them, 12 times the pixels.
    "camera": {
        "data": {"name": "folder", "path": "camera", "image_size": 64},
        "model": _RESNET,
        "optim": {**_OPTIM, "name": "sgd"},
    },
    # A larger model on random images in memory.
    "synthetic": {
        "data": {"name": "synthetic", "image_size": 32, "samples": 2048, "classes": 100},
        "model": {"name": "resnet18"},
        "optim": {**_OPTIM, "name": "sgd"},
    },
    # Many little images in many little shards, for what comes over a network.
    "many-shards": {
        "data": {"name": "pack", "path": "many-shards", "image_size": 16},
        "model": _RESNET,
        "optim": _OPTIM,
    },
    # Little images; four times as many to evaluate as to train.
    "evaluated": {
        "data": {"name": "folder", "path": "evaluated", "image_size": 32},
        "model": _RESNET,
        "optim": _OPTIM,
    },
}


def write_recipes(folder: Path) -> None:
    """Writes `<name>.yaml`; paths of data are made absolute."""
    for name, recipe in RECIPES.items():
        data = {"global_batch_size": 32, "micro_batch_size": 32, **recipe["data"]}
        if "path" in data:
            data["path"] = str(folder / data["path"])
        values = {
            **{"about": f"{name}, to be slowed", "epochs": 1000, "evaluation": {"every": "end"}, **recipe},
            **{"data": data, "log": _LOG, "checkpoint": {"minutes": 0, "best": False}},
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(values, sort_keys=False))


def prepare(folder: Path) -> None:
    """Makes recipes and data, if they aren't there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    write_recipes(folder)
    made = folder / "made.json"
    if made.exists():
        return
    for part, count in (("train", 1200), ("val", 60)):
        _photographs(folder / "photos" / part, count)
    _camera(folder / "camera")
    _command("data", "pack", "--short-side", "128", str(folder / "photos"), str(folder / "packed"))
    _shards(folder)
    write_pack(folder / "many-shards" / "train", [64] * 200)
    write_pack(folder / "many-shards" / "val", [64], seed=1)
    for part, count in (("train", 256), ("val", 1024)):
        _little(folder / "evaluated" / part, count)
    made.write_text(json.dumps({"originals": [path.name for path in originals()]}))


def _photographs(folder: Path, count: int) -> None:
    """A tenth of them are made, and the others are copies, each a file of its own."""
    write_photographs(folder, count // 10)
    for number, path in enumerate(sorted(folder.rglob("*.jpg"))):
        for copy in range(9):
            path.with_name(f"copy-{copy}-{number}.jpg").write_bytes(path.read_bytes())


def _camera(folder: Path) -> None:
    image = Image.open(originals()[0]).convert("RGB")
    for part, count in (("train", 240), ("val", 8)):
        target = folder / part
        for label in range(2):
            (target / str(label)).mkdir(parents=True)
        image.resize((1800, 1350), Image.Resampling.BICUBIC).save(target / "0" / "0.jpg", quality=92)
        content = (target / "0" / "0.jpg").read_bytes()
        for number in range(1, count):
            (target / str(number % 2) / f"{number}.jpg").write_bytes(content)


def _shards(folder: Path) -> None:
    import tarfile

    for part in ("train", "val"):
        target = folder / "shards" / part
        target.mkdir(parents=True)
        files = sorted((folder / "photos" / part).rglob("*.jpg"))
        for shard in range(16):
            with tarfile.open(target / f"{shard}.tar", "w") as tar:
                for number, path in enumerate(files[shard::16]):
                    stem = f"{shard}-{number:05d}"
                    tar.add(path, f"{stem}.jpg")
                    label = target / "label"
                    label.write_text(path.parent.name)
                    tar.add(label, f"{stem}.cls")
                    label.unlink()
    for part in ("train", "val"):
        _command("data", "index", str(folder / "shards" / part))


def _little(folder: Path, count: int) -> None:
    random = np.random.default_rng(count)
    for number in range(count):
        target = folder / str(number % 4) / f"{number}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(target)


def _command(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "trainer", *arguments], check=True, stdout=subprocess.DEVNULL)
