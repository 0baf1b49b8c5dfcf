"""Promise: an image gives the same pixels from every format; what can't be decoded is named or replaced."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.batches import CPU, FORK, arrays_of, read_all
from tests.helpers.image_folders import SIDE, opened
from tests.helpers.refusals import refused
from trainer.data.corrupt import Bad, Corrupt, Quarantine, fill_rows
from trainer.data.formats import decode
from trainer.data.formats.files import in_folder
from trainer.data.formats.images import ImageDataset
from trainer.data.loader import RingLoader, Source
from trainer.data.sampling.plan import Plan, Share


@pytest.mark.parametrize("kind", ["csv", "parquet", "shards", "pack"])
def test_every_format_has_the_same_images_in_order(kind: str, photographs: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(3).random((30, 4), dtype=np.float32)
    expected, found = (
        arrays_of(ImageDataset(one, SIDE, random_crop=True), random=random)[0]
        for one in (in_folder(photographs), opened(kind, photographs, tmp_path))
    )
    assert np.array_equal(expected["image"], found["image"])
    assert np.array_equal(expected["label"], found["label"])
    assert len(np.unique(expected["label"])) == 10


@pytest.mark.parametrize("kind", ["folder", "shards", "raw"])
def test_no_worker_and_no_resume_changes_what_stands_in(kind: str, broken: Path, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    records, file = opened(kind, broken, tmp_path / "work"), tmp_path / "quarantine.jsonl"
    dataset = ImageDataset(records, SIDE, random_crop=True, on_corrupt="quarantine")
    source = Source(dataset, Share(Plan(len(dataset), 4, 4, 2, last="cross", seed=1)), 4)
    batches = source.share.batches()

    def run(workers: int, batches: range) -> list[list[bytes]]:
        return read_all(RingLoader(source, CPU, workers, FORK, Quarantine("training", 3, file)), batches)

    expected = run(0, batches)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len({batch[0] for batch in expected}) == len(batches), "no two batches are the same"
    assert sorted(line["sample"] for line in lines) == [2, 9, 16], "each once, in two epochs"
    assert all(line["data"] == "training" and line["name"] and line["reason"] for line in lines)
    assert run(2, batches[9:]) == expected[9:]
    assert len(file.read_text().splitlines()) == 3, "what an earlier attempt wrote is known"


def test_starting_again_does_not_get_around_the_budget(tmp_path: Path) -> None:
    file, found = tmp_path / "quarantine.jsonl", [Bad(n, f"{n}.jpg", "torn") for n in range(3)]
    first, second = Quarantine("training", 2, file), Quarantine("training", 2, file)
    first.add(found[:2])
    with refused("3 training"):
        second.add(found[1:])
    assert len(file.read_text().splitlines()) == 3, "two ranks write each once"
    with refused("3 training", file):
        Quarantine("training", 2, file)
    Quarantine("evaluation", 0, file)
    first.samples.clear()
    with refused("3 training"):
        first.add(found[:1])


def test_an_image_is_resized_alike_however_it_lies_in_memory_and_by_the_quick_path() -> None:
    """torch takes the quick one where every stride is that of channels last, the batch's of one, too."""
    random = np.random.default_rng(0)
    for channels, height, width in ((3, 90, 70), (3, 20, 30), (1, 50, 60)):
        rows = torch.from_numpy(random.integers(0, 256, (height, width, channels), np.uint8))
        planes = rows.permute(2, 0, 1).contiguous()[None]
        expected = torch.ops.aten._upsample_bilinear2d_aa(planes, [32, 40], False, None, None)
        whole, part = rows.permute(2, 0, 1)[None], torch.nn.functional.pad(planes, (3, 2, 1, 4))
        for image in (planes, whole, rows[None].permute(0, 3, 1, 2), part[:, :, 1:-4, 3:-2]):
            found = decode.resize(image, 32, 40)
            assert torch.equal(found, expected)
            assert channels == 1 or found.stride() == (32 * 40 * 3, 1, 40 * 3, 3)


def test_a_shard_that_vanishes_or_shrinks_is_not_corrupt(photographs: Path, tmp_path: Path) -> None:
    records = opened("shards", photographs, tmp_path)
    first = records.read(0)
    for shard in ("000.tar", "002.tar"):
        (tmp_path / shard).unlink()
    assert records.read(0) == first, "an open file stays"
    os.truncate(tmp_path / "001.tar", 5000)
    dataset = ImageDataset(records, SIDE, random_crop=True, on_corrupt="skip")
    for sample, names in ((8, "001.tar 5,000"), (15, "002.tar")):
        with refused(tmp_path, names):
            arrays_of(dataset, [sample], 0.5)


def test_what_stands_in_goes_by_the_sample_alone() -> None:

    def stand_in(samples: list[int]) -> int:
        filled = dict[int, int]()

        def fill(row: int, sample: int) -> None:
            if sample == 5:
                raise Corrupt("torn")
            filled[row] = sample

        assert [bad.sample for bad in fill_rows(np.array(samples), fill, str, "skip", 100)] == [5]
        return filled[samples.index(5)]

    assert stand_in([5]) == stand_in([1, 2, 5]) == stand_in([9, 5, 3, 4])
