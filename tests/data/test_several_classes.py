"""Promise: images of several classes, by a separator or by columns, train with a sigmoid, and are told so."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from torch.nn import functional as F

from tests.helpers.batches import arrays_of
from tests.helpers.refusals import named, refused
from trainer.config.data import DataConfig
from trainer.config.model import ModelConfig
from trainer.config.tasks import RegularizationConfig
from trainer.data.batch import Batch
from trainer.data.sources import load_images
from trainer.tasks.classification import Classification

TRAIN = ["cat|dog", "dog", "emu|cat", "", "dog | cat"]
VAL = ["emu", "dog", "dog|emu"]
CLASSES = ("cat", "dog", "emu")


@pytest.fixture(params=["separator", "columns", "parquet", "parquet columns"])
def data(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """The same images and classes, written in four ways."""
    kind, pixels = cast(str, request.param), np.random.default_rng(0)
    for part, rows in (("train", TRAIN), ("val", VAL)):
        table: dict[str, list[Any]] = {"path": [f"{part}{number}.png" for number in range(len(rows))]}
        for name in table["path"]:
            Image.fromarray(pixels.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(tmp_path / name)
        if "columns" in kind:
            table |= {each: [int(each in row) for row in rows] for each in CLASSES}
        else:
            table["label"] = list(rows)
        if "parquet" in kind:
            parquet.write_table(pyarrow.table(table), tmp_path / f"{part}.parquet")
        else:
            lines = [",".join(map(str, row)) for row in (table, *zip(*table.values(), strict=True))]
            (tmp_path / f"{part}.csv").write_text("\n".join(lines))
    how: dict[str, Any] = {"label_columns": [*CLASSES]} if "columns" in kind else {"label_separator": "|"}
    sizes = {"image_size": 8, "global_batch_size": 4, "micro_batch_size": 4, "workers": 0}
    return {"name": "table", "path": tmp_path, **how, **sizes}


def told(rows: Sequence[str]) -> list[list[int]]:
    return [[int(name in row) for name in CLASSES] for row in rows]


def test_each_class_of_an_image_is_a_one(data: dict[str, Any]) -> None:
    images = load_images(DataConfig(**data), 0)
    assert images.classes == CLASSES
    for part, rows in ((images.train, TRAIN), (images.evaluation, VAL)):
        assert arrays_of(part, random=0.5 if part.uniforms else None)[0]["label"].tolist() == told(rows)
    assert named(images.notes, "cat val")


def test_the_loss_is_the_binary_cross_entropy_of_a_sigmoid(data: dict[str, Any]) -> None:
    def task_of(**keys: Any) -> Classification:
        return Classification(DataConfig(**data), ModelConfig(), RegularizationConfig(**keys), 0)

    task, label = task_of(), torch.tensor(told(TRAIN), dtype=torch.uint8)
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    model: Any = lambda image: logits[: len(image)]  # noqa: E731
    fields = {"image": torch.zeros(5, 8, 8, 3, dtype=torch.uint8), "label": label}
    found = task.measure(model, Batch(fields, torch.tensor([1.0, 1, 1, 1, 0]), None, 4))
    wanted = F.binary_cross_entropy_with_logits(logits[:4], label[:4].float()) * 4
    torch.testing.assert_close(found["loss"], wanted)
    assert found["accuracy"] == ((logits.sigmoid() > 0.5) == label.bool()).all(1)[:4].sum()
    fields["label"], logits[:] = torch.zeros_like(label), float("nan")
    assert task.measure(model, Batch(fields, None, None, 5))["accuracy"] == 0
    with refused("regularization.label_smoothing"):
        task_of(label_smoothing=0.1)


def test_the_fingerprint_tells_sets_of_classes_apart(tmp_path: Path) -> None:
    seen = set[str]()
    (tmp_path / "val.csv").write_text("path,label\nv.png,a|b\n")
    for labels in ("a b a|b", "b a a|b", "a|b b a", "a|b b b", "a a b"):
        rows = "".join(f"{number}.png,{label}\n" for number, label in enumerate(labels.split()))
        (tmp_path / "train.csv").write_text(f"path,label\n{rows}")
        config = DataConfig(name="table", path=tmp_path, label_separator="|")
        seen.add(load_images(config, 0).train.fingerprint())
    assert len(seen) == 5


def test_what_is_neither_is_named(tmp_path: Path) -> None:
    for part in ("train", "val"):
        (tmp_path / f"{part}.csv").write_text("path,cat,dog\na.png,1,0\nb.png,1,2\n")
    with refused(tmp_path / "train.csv", "line 3 dog 2"):
        load_images(DataConfig(name="table", path=tmp_path, label_columns=["cat", "dog"]), 0)
    with refused(tmp_path / "train.csv", "emu"):
        load_images(DataConfig(name="table", path=tmp_path, label_columns=["cat", "emu"]), 0)
    for other in ({"name": "folder"}, {"label_columns": ["cat"]}, {"class_weights": "balanced"}):
        with pytest.raises(ValueError, match=r"data\.label_separator"):
            DataConfig.model_validate({"name": "table", "label_separator": "|", **other})


def test_classes_that_look_like_several_are_noted(tmp_path: Path) -> None:
    for part in ("train", "val"):
        (tmp_path / f"{part}.csv").write_text(f"path,label\n{part}1.png,cat|dog\n{part}2.png,dog\n")
    (note,) = load_images(DataConfig(name="table", path=tmp_path), 0).notes
    assert named(note, "data.label_separator 1 2")
