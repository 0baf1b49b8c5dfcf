"""Promise: an image gives the same pixels from every format; what can't be decoded is named or replaced."""

import io
import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from tests.helpers.batches import CPU, FORK, arrays_of, read_all
from tests.helpers.image_folders import SIDE, encoded, opened, picture
from tests.helpers.refusals import refused
from trainer.config.data import LoaderConfig
from trainer.data.corrupt import Bad, Corrupt, Quarantine, fill_rows
from trainer.data.formats import decode
from trainer.data.formats.crop import Box
from trainer.data.formats.files import in_folder
from trainer.data.formats.images import ImageDataset
from trainer.data.loader import RingLoader, Source
from trainer.data.sampling.plan import Plan, Share


def pixels(data: bytearray) -> npt.NDArray[np.uint8]:
    return decode.cut_out(data, lambda *size: Box(0, 0, *size))[0].permute(1, 2, 0).numpy()


@pytest.mark.parametrize(
    ("kind", "mode", "options"),
    [
        ("JPEG", "RGB", {"quality": 90}),
        ("JPEG", "RGB", {"quality": 90, "progressive": True}),
        ("JPEG", "CMYK", {"quality": 90}),
        *(("PNG", mode, {}) for mode in ("RGB", "RGBA", "P", "1")),
        ("WEBP", "RGB", {"lossless": True}),
        ("GIF", "P", {"save_all": True, "append_images": [Image.new("RGB", (40, 30), "red")]}),
        ("TIFF", "RGB", {}),
    ],
)
def test_every_kind_is_what_pillow_makes_of_it(kind: str, mode: str, options: dict[str, Any]) -> None:
    data = encoded(picture(mode), kind, **options)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.abs(pixels(data).astype(int) - expected).max() <= (2 if kind == "JPEG" else 0)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_sixteen_bits_keep_their_upper_eight(kind: str) -> None:
    deep = np.linspace(0, 65535, 1200).astype(np.uint16).reshape(30, 40)
    found = pixels(encoded(Image.fromarray(deep), kind))
    assert np.array_equal(found, np.repeat((deep >> 8).astype(np.uint8)[..., None], 3, 2))


def bomb(kind: str) -> bytearray:
    """Of 50,000 x 50,000 pixels, by its header."""
    data = encoded(picture(), kind)
    if kind == "PNG":
        data[16:24] = struct.pack(">II", 50_000, 50_000)
        data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    else:
        at = data.index(b"\xff\xc0")
        data[at + 5 : at + 9] = struct.pack(">HH", 50_000, 50_000)
    return data


def cut_off(kind: str, share: float, **options: Any) -> bytearray:
    data = encoded(picture(size=(200, 150)), kind, **options)
    return data[: int(len(data) * share)]


BAD: dict[str, Callable[[], bytearray]] = {
    "empty": bytearray,
    "text": lambda: bytearray(b"<html>404 not found</html>"),
    "jpeg_nearly": lambda: cut_off("JPEG", 0.95),
    "progressive_half": lambda: cut_off("JPEG", 0.5, progressive=True),
    "png_half": lambda: cut_off("PNG", 0.5),
    "webp_half": lambda: cut_off("WEBP", 0.5),
    "float": lambda: encoded(Image.fromarray(np.ones((9, 9), np.float32)), "TIFF"),
    "bomb_png": lambda: bomb("PNG"),
    "bomb_jpeg": lambda: bomb("JPEG"),
    "postscript": lambda: bytearray(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n%%EOF\n"
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_damaged_is_corrupt(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no program is run: PIL would run Ghostscript for PostScript."""
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(Corrupt) as raised:
        pixels(BAD[name]())
    assert len(str(raised.value)) < 200 and "\n" not in str(raised.value)
    assert not (tmp_path / "ran").exists()


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


@pytest.mark.parametrize("kind", ["shards", "raw"])
def test_workers_and_a_resume_change_no_bit(kind: str, photographs: Path, tmp_path: Path) -> None:
    dataset = ImageDataset(opened(kind, photographs, tmp_path), SIDE, random_crop=True)
    plan = Plan(len(dataset), 8, 4, 2, last="cross", seed=1)
    source = Source(dataset, Share(plan), 5)
    batches = source.share.batches()
    expected = read_all(RingLoader(source, CPU, 0, LoaderConfig()), batches)
    assert len({batch[0] for batch in expected}) == len(batches), "no two batches are the same"
    assert read_all(RingLoader(source, CPU, 2, FORK), batches[5:]) == expected[5:]


@pytest.mark.parametrize("kind", ["folder", "raw"])
def test_what_stands_in_is_always_the_same(kind: str, broken: Path, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    records, file = opened(kind, broken, tmp_path / "work"), tmp_path / "quarantine.jsonl"
    dataset = ImageDataset(records, SIDE, random_crop=True, on_corrupt="quarantine")
    source = Source(dataset, Share(Plan(len(dataset), 4, 4, 2, last="cross", seed=1)), 4)
    batches = source.share.batches()

    def run(workers: int, batches: range) -> list[list[bytes]]:
        return read_all(RingLoader(source, CPU, workers, FORK, Quarantine("training", 3, file)), batches)

    expected = run(0, batches)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
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
    """Not by the row of a batch, which is another one in each epoch."""

    def stand_in(samples: list[int]) -> int:
        filled = dict[int, int]()

        def fill(row: int, sample: int) -> None:
            if sample == 5:
                raise Corrupt("torn")
            filled[row] = sample

        assert [bad.sample for bad in fill_rows(np.array(samples), fill, str, "skip", 100)] == [5]
        return filled[samples.index(5)]

    assert stand_in([5]) == stand_in([1, 2, 5]) == stand_in([9, 5, 3, 4])
