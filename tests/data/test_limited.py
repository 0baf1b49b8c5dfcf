"""Promise: data.limit trains and measures on a few evenly spaced samples of any data, always the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.data.test_arrow import pictures, write
from tests.data.test_coco import told, written
from tests.data.test_tokenize import token_file
from tests.helpers.batches import arrays_of
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
from trainer.train.components.task import check_request, data_of, make_task


class Torn(ArrayDataset):
    def read(self, samples: Any, random: Any, out: Any) -> Any:
        super().read(samples, random, out)
        return [Bad(9, "there", "why")]


def test_it_reads_evenly_spaced_samples_and_numbers_them_anew() -> None:
    few = LimitedDataset(Torn({"x": np.arange(10)}), np.array([0, 3, 6, 9]))
    out, bad = arrays_of(few, [0, 3])
    assert ([one.sample for one in bad], out["x"].tolist()) == ([3], [0, 9])
    assert few.arrays is not None and few.arrays["x"].tolist() == [0, 3, 6, 9]


def test_of_a_task() -> None:
    few = ["data.limit=10", "data.global_batch_size=4", "data.micro_batch_size=4"]
    one, other = load_recipe("digits", few), load_recipe("digits", [*few, "data.limit=9"])
    task = make_task(one)
    assert (len(task.train_data), len(task.evaluation_data)) == (10, 10)
    check_request(one, task, 1)
    assert data_of(one, task)["training data"] != data_of(other, make_task(other))["training data"]


def images_of(records: Records) -> Dataset:
    return ImageDataset(records, 8, random_crop=False)


def coco_at(root: Path) -> Dataset:
    what = told()
    what["images"].reverse()  # the last one's boxes don't follow those of the first
    return BoxedImages(CocoPictures(written(root, what), "train", "fail", training=False), 32, 4, None)


MAKERS: dict[str, Callable[[Path], Dataset]] = {
    "hf": lambda root: images_of(ArrowImages(write(root / "train", pictures(9)), "image", "label")),
    "coco": coco_at,
    "tokens": lambda root: TokenDataset(token_file(root, np.arange(60)), 6, "uint16"),
    "items": lambda _: ItemDataset(ArrayItems({"x": np.arange(18).reshape(9, 2)}), "training"),
    "canvas": lambda _: BoxedImages(DigitsCanvas(0, 9), 96, 8, None),
    "noise": lambda _: BoxedImages(SyntheticPictures(32, 3, 9, 0), 32, 8, None),
    "arrays": lambda _: ArrayDataset({"x": np.arange(9), "label": np.arange(9) % 2}),
}


def batch(data: Dataset, samples: Any) -> dict[str, bytes]:
    out, bad = arrays_of(data, samples)
    assert not bad
    return {name: array.tobytes() for name, array in out.items()}


@pytest.mark.parametrize("kind", ["folder", "csv", "shards", "raw", *MAKERS])
def test_of_every_format(kind: str, tmp_path: Path, photographs: Path) -> None:
    whole = MAKERS[kind](tmp_path) if kind in MAKERS else images_of(opened(kind, photographs, tmp_path))
    count = min(4, len(whole) - 1)
    few, chosen = limited(whole, count), spread(len(whole), count)
    assert len(few) == count and few.fields == whole.fields
    assert batch(few, range(count)) == batch(whole, chosen)
    assert len({data.fingerprint() for data in (whole, few, limited(whole, count - 1))}) == 3, "each its own"
    assert few.fingerprint() == limited(whole, count).fingerprint()
    records: Any = getattr(whole, "records", None)
    assert (getattr(few, "records", None) is None) == (records is None)
    if isinstance(records, Records):
        some: Any = few
        assert type(few) is type(whole), "predict and the diagnosis ask for it"
        assert [some.records.name(n) for n in range(count)] == [records.name(n) for n in chosen.tolist()]
        assert some.records.labels.tolist() == records.labels[chosen].tolist()
        assert some.records.upright == records.upright and some.records.absent() == ""
        assert some.left_out == getattr(whole, "left_out", None)


def test_a_mosaic_is_of_the_few() -> None:
    whole = BoxedImages(DigitsCanvas(0, 40), 96, 8, BoxAugment(mosaic=1.0))
    few: Any = limited(whole, 3)
    few.pictures.read = mock.Mock(wraps=few.pictures.read)
    arrays_of(few, [0], 0.9)
    assert few.pictures.read.mock_calls == [mock.call(sample) for sample in (2, 2, 2, 0)]
