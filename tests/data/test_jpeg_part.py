"""Promise: a part of a JPEG that is decoded alone has the bits of the whole; what is damaged ends alike."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.photographs import write_photographs
from trainer.data.corrupt import Corrupt
from trainer.data.formats import decode, jpeg_part
from trainer.data.formats.crop import Box
from trainer.data.formats.files import in_folder
from trainer.host.turbojpeg import TurboJpeg, find_turbojpeg

needs_library = pytest.mark.skipif(
    find_turbojpeg().code is None,
    reason="needs libturbojpeg.so.0 of libjpeg-turbo 3 (conda's; in the images)",
)
# Sides about a block's, odd ones, and what pillow writes: 4:4:4, 4:2:2, 4:2:0; gray has no colors to sample.
SIZES = [(1, 1), (3, 5), (8, 8), (16, 16), (17, 33), (31, 15), (64, 48), (99, 131), (184, 16), (16, 184)]
KINDS: list[tuple[str, dict[str, Any]]] = [
    *(("RGB", {"subsampling": kind}) for kind in range(3)),
    ("RGB", {"subsampling": 2, "restart_marker_rows": 1}),
    ("RGB", {"subsampling": 2, "progressive": True}),
    ("L", {}),
    ("CMYK", {}),
]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each image that was asked for in part was decoded in part."""
    seen = list[bool]()

    def noted(*given: Any) -> torch.Tensor | None:
        part = jpeg_part.decode_part(*given)
        seen.append(part is not None)
        return part

    monkeypatch.setattr(decode, "decode_part", noted)
    return seen


def encoded(random: np.random.Generator, height: int, width: int, mode: str, **options: Any) -> bytearray:
    noise = random.integers(0, 256, (height, width, 3), np.uint8)
    smooth = np.add.outer(np.arange(height), np.arange(width))[:, :, None] * np.array([1, 2, 3])
    file = io.BytesIO()
    Image.fromarray((noise // 4 + smooth % 190).astype(np.uint8)).convert(mode).save(file, "JPEG", **options)
    return bytearray(file.getvalue())


def some_box(random: np.random.Generator, height: int, width: int) -> Box:
    tall, wide = int(random.integers(1, height + 1)), int(random.integers(1, width + 1))
    return Box(
        int(random.integers(0, height - tall + 1)), int(random.integers(0, width - wide + 1)), tall, wide
    )


def outcome(data: bytearray, box: Box) -> torch.Tensor | str:
    try:
        return decode.cut_out(data, lambda *_: box)
    except Corrupt as error:
        return str(error)


def from_the_whole(data: bytearray, box: Box) -> torch.Tensor | str:
    try:
        image = decode.whole(data)
    except Corrupt as error:
        return str(error)
    return image[:, :, box.top : box.top + box.height, box.left : box.left + box.width]


def same(one: torch.Tensor | str, other: torch.Tensor | str) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return isinstance(one, str) and one == other


@needs_library
@pytest.mark.parametrize(("mode", "options"), KINDS, ids=[f"{mode} {options}" for mode, options in KINDS])
def test_a_part_has_the_bits_of_the_whole(mode: str, options: dict[str, Any], parts: list[bool]) -> None:
    random = np.random.default_rng(0)
    for height, width in SIZES:
        data = encoded(random, height, width, mode, quality=85, **options)
        for box in [Box(0, 0, 1, 1), *(some_box(random, height, width) for _ in range(12))]:
            assert same(outcome(data, box), from_the_whole(data, box)), (height, width, box)
    assert any(parts) == (mode != "CMYK" and not options.get("progressive"))
    assert all(parts) or not any(parts)


@needs_library
def test_of_photographs_every_part_is_decoded_alone(tmp_path: Path, parts: list[bool]) -> None:
    write_photographs(tmp_path, 12)
    records, random = in_folder(tmp_path), np.random.default_rng(1)
    for sample in range(len(records)):
        data = records.read(sample)
        header = decode.look(data)
        box = some_box(random, header.height, header.width)
        assert same(outcome(data, box), from_the_whole(data, box))
    assert all(parts)


@needs_library
def test_an_orientation_turns_nothing(parts: list[bool]) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(np.random.default_rng(0), 60, 80, "RGB", exif=exif.tobytes())
    assert same(outcome(data, Box(10, 20, 30, 40)), from_the_whole(data, Box(10, 20, 30, 40)))
    assert parts == [True]


def cut(random: np.random.Generator, data: bytearray) -> bytearray:
    return data[: int(random.integers(20, len(data)))]


def with_a_marker(random: np.random.Generator, data: bytearray) -> bytearray:
    """A byte after one that is 0xFF becomes another."""
    marks = [at for at in range(2, len(data) - 1) if data[at] == 0xFF]
    data[marks[int(random.integers(len(marks)))] + 1] = int(random.integers(0, 256))
    return data


def longer(random: np.random.Generator, data: bytearray) -> bytearray:
    return data + random.bytes(30)


def of_other_size(random: np.random.Generator, data: bytearray) -> bytearray:
    at = data.index(b"\xff\xc0") + 5 + int(random.integers(0, 4))
    data[at] = int(random.integers(0, 2))
    return data


@pytest.mark.parametrize("damage", [cut, with_a_marker, longer, of_other_size])
def test_what_is_damaged_ends_alike(damage: Callable[..., bytearray], parts: list[bool]) -> None:
    """With the same one line, or the same pixels; without the library the paths are one anyway."""
    random, errors = np.random.default_rng(2), 0
    for number in range(150):
        mode, options = KINDS[number % 4]
        data = damage(random, encoded(random, 60, 80, mode, quality=70, **options))
        try:
            header = decode.look(data)
        except Corrupt:
            continue
        if header.kind != "jpeg" or header.height * header.width == 0:
            continue
        box = some_box(random, header.height, header.width)
        found, expected = outcome(data, box), from_the_whole(data, box)
        assert same(found, expected), (number, box, found, expected)
        errors += isinstance(found, str)
    assert parts
    assert errors or damage in (longer, of_other_size)


@needs_library
def test_a_file_cut_off_below_the_part_is_refused(parts: list[bool]) -> None:
    data = encoded(np.random.default_rng(0), 200, 80, "RGB")
    assert "incomplete or truncated" in str(outcome(data[: len(data) // 2], Box(0, 0, 8, 8)))
    assert parts == [False]


def test_without_the_library_the_whole_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    data, box = encoded(np.random.default_rng(0), 60, 80, "RGB"), Box(10, 20, 30, 40)
    expected = outcome(data, box)
    monkeypatch.setattr(jpeg_part, "find_turbojpeg", lambda: TurboJpeg("", None))
    assert jpeg_part.decode_part(data, 60, 80, box) is None
    assert same(outcome(data, box), expected)
