"""Promise: data.limit trains and measures on a few evenly spaced samples of any data, always the same."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.helpers.image_folders import opened
from trainer.config.recipe_file import load_recipe
from trainer.data.builtin.boxes import DigitsCanvas, SyntheticPictures
from trainer.data.corrupt import Bad
from trainer.data.dataset import ArrayDataset, Dataset, LimitedDataset, limited, spread
from trainer.data.formats.arrow import ArrowImages
from trainer.data.formats.boxes import BoxAugment, BoxedImages
from trainer.data.formats.coco import CocoPictures
from trainer.data.formats.images import ImageDataset
from trainer.data.formats.records import Records
from trainer.data.formats.tokens import TokenDataset
from trainer.data.items import ArrayItems, ItemDataset
from trainer.train.components.task import check_request, data_of, make_plan, make_task


class Corrupt(ArrayDataset):
    """Of which a sample can't be decoded."""

    def read(self, samples, random, out):  # type: ignore[no-untyped-def]
        """As that, and says so."""
        super().read(samples, random, out)
        return [Bad(9, "there", "why")]


def test_it_reads_evenly_spaced_samples_and_numbers_them_anew() -> None:
    few = LimitedDataset(Corrupt({"x": np.arange(10)}), np.array([0, 3, 6, 9]))
    out = {"x": np.zeros(2, np.int64)}
    assert [bad.sample for bad in few.read(np.array([0, 3]), None, out)] == [3]
    assert out["x"].tolist() == [0, 9]
    assert few.arrays is not None and few.arrays["x"].tolist() == [0, 3, 6, 9]


@pytest.mark.parametrize("recipe", ["digits", "gpt-stdlib language.text=padded"])
def test_of_every_task(recipe: str) -> None:
    name, *more = recipe.split()
    few = [*more, "data.limit=10", "data.global_batch_size=4", "data.micro_batch_size=4"]
    one = load_recipe(name, few)
    task = make_task(one)
    assert (len(task.train_data), len(task.evaluation_data)) == (10, 10)
    assert sum(make_plan(one, task).buckets) in (0, 10)
    check_request(one, task, 1)
    other = load_recipe(name, [*few, "data.limit=9"])
    assert data_of(one, task)["training data"] != data_of(other, make_task(other))["training data"]


def _hf(root: Path) -> Dataset:
    from tests.data.test_arrow import png, write

    images = [{"bytes": png(20 * n), "path": None} for n in range(9)]
    folder = write(root / "train", {"image": images, "label": [n % 2 for n in range(9)]})
    return ImageDataset(ArrowImages(folder, "image", "label"), 8, random_crop=False)


def _coco(root: Path) -> Dataset:
    (root / "annotations").mkdir()
    (root / "train").mkdir()
    boxes = [(n, k) for n in range(9) for k in range(n % 3)]
    told = {
        "images": [{"id": n, "file_name": f"{n}.png", "height": 20, "width": 30} for n in range(9)],
        "annotations": [
            {"id": at, "image_id": n, "category_id": 1, "bbox": [n, k, 3 + k, 4]}
            for at, (n, k) in enumerate(boxes)
        ],
        "categories": [{"id": 1, "name": "thing"}],
    }
    for n in range(9):
        Image.fromarray(np.full((20, 30, 3), 9 * n, np.uint8)).save(root / "train" / f"{n}.png")
    (root / "annotations" / "instances_train.json").write_text(json.dumps(told))
    return BoxedImages(CocoPictures(root, "train", "fail"), 32, 4, None)


def _tokens(root: Path) -> Dataset:
    from tests.data.test_tokens import token_file

    return TokenDataset(token_file(root, np.arange(60)), 6, "uint16")


def _items(root: Path) -> Dataset:  # noqa: ARG001
    return ItemDataset(ArrayItems({"x": np.arange(18).reshape(9, 2)}), "training")


def _of_files(kind: str) -> Any:
    def make(root: Path, photographs: Path) -> Dataset:
        return ImageDataset(opened(kind, photographs, root), 8, random_crop=False)

    return make


MAKERS: dict[str, Any] = {
    **{kind: _of_files(kind) for kind in ("folder", "csv", "shards", "raw")},
    **{make.__name__[1:]: make for make in (_hf, _coco, _tokens, _items)},
    "canvas": lambda _: BoxedImages(DigitsCanvas(0, 9), 96, 8, None),
    "noise": lambda _: BoxedImages(SyntheticPictures(32, 3, 9, 0), 32, 8, None),
    "arrays": lambda _: ArrayDataset({"x": np.arange(9), "label": np.arange(9) % 2}),
}


def batch(data: Dataset, samples: Any) -> dict[str, bytes]:
    out = {name: np.zeros((len(samples), *field.shape), field.dtype) for name, field in data.fields.items()}
    assert not data.read(np.asarray(samples), None, out)
    return {name: array.tobytes() for name, array in out.items()}


@pytest.mark.parametrize("kind", MAKERS)
def test_of_every_format(kind: str, tmp_path: Path, photographs: Path) -> None:
    """The same bits for the same samples, and files that are looked up as those of the whole are."""
    make = MAKERS[kind]
    whole = make(tmp_path, photographs) if kind in _FILES else make(tmp_path)
    few, chosen = limited(whole, 4), spread(len(whole), 4)
    assert len(few) == 4
    assert few.fields == whole.fields
    assert batch(few, range(4)) == batch(whole, chosen)
    prints = {data.fingerprint() for data in (whole, few, limited(whole, 3))}
    assert len(prints) == 3, "each its own"
    assert few.fingerprint() == limited(whole, 4).fingerprint()
    records: Any = getattr(whole, "records", None)
    assert (getattr(few, "records", None) is None) == (records is None)
    if isinstance(records, Records):
        some: Any = few
        numbers = chosen.tolist()
        assert type(few) is type(whole), "predict and the diagnosis ask for it"
        assert [some.records.name(n) for n in range(4)] == [records.name(n) for n in numbers]
        assert some.records.labels.tolist() == records.labels[chosen].tolist()
        assert some.records.upright == records.upright
        assert some.records.absent() == ""
        assert some.left_out == getattr(whole, "left_out", None)


_FILES = ("folder", "csv", "shards", "raw")


def test_a_mosaic_is_of_the_few() -> None:
    whole = BoxedImages(DigitsCanvas(0, 40), 96, 8, BoxAugment(mosaic=1.0))
    few: Any = limited(whole, 3)
    read = list[int]()
    inner = few.pictures.read

    def noted(sample: int) -> Any:
        read.append(sample)
        return inner(sample)

    few.pictures.read = noted
    out = {name: np.zeros((1, *field.shape), field.dtype) for name, field in few.fields.items()}
    few.read(np.array([0]), np.full((1, few.uniforms), 0.9, np.float32), out)
    assert read == [2, 2, 2, 0]
