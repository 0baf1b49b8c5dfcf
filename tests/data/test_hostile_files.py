"""Promise: files of others that are made to hang or to fill the memory end in one line, soon."""

import io
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from trainer.data.corrupt import Corrupt
from trainer.data.formats import decode
from trainer.data.formats.encoders import read_tokenizer
from trainer.errors import BadInputError


def jpeg(width: int, height: int) -> bytes:
    """A progressive one; its header says a size of its own."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "JPEG", progressive=True)
    data = bytearray(file.getvalue())
    at = data.find(b"\xff\xc2")
    data[at + 5 : at + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def test_a_jpeg_of_thousands_of_scans_is_refused_before_it_is_decoded() -> None:
    data = jpeg(4000, 4000)
    scans = data[data.find(b"\xff\xda") : -2]
    with pytest.raises(Corrupt, match="scans"):
        decode.decode_whole(bytearray(data[:-2] + scans * 3000 + data[-2:]))
    small = jpeg(8, 8)
    assert decode.decode_whole(bytearray(small)).shape == (1, 3, 8, 8)


@pytest.mark.parametrize("size", [65_535, 2**31 - 1])
def test_a_png_of_too_many_pixels_is_told_by_its_header(size: int) -> None:
    said = struct.pack(">IIBBBBB", size, size, 8, 0, 0, 0, 0)
    chunk = b"IHDR" + said
    png = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    with pytest.raises(Corrupt, match="too many"):
        decode.decode_whole(bytearray(png))


@pytest.mark.parametrize("kind", ["WEBP", "JPEG2000", "AVIF"])
def test_a_picture_of_few_bytes_is_not_decoded_to_gigabytes(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The formats that take more than 15 bytes for each pixel while they are decoded."""
    if kind not in decode.formats():
        pytest.skip(f"PIL is built without {kind}")
    file = io.BytesIO()
    Image.new("RGB", (40, 30)).save(file, kind)
    data = bytearray(file.getvalue())
    assert decode.decode_whole(data).shape == (1, 3, 30, 40)
    monkeypatch.setattr(decode, "_MOST_BYTES", 15 * 40 * 30)
    with pytest.raises(Corrupt, match=f"40 x 30 pixels are too many: more than .* of {kind} aren't read"):
        decode.decode_whole(data)


def deep(folder: Path) -> str:
    (folder / "t.json").write_bytes(b'{"model":' + b"[" * 1_000_000)
    return str(folder / "t.json")


def an_odd_regex(folder: Path) -> str:
    split = {"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": False}
    (folder / "t.json").write_text(json.dumps({"version": "1.0", "pre_tokenizer": split}))
    return str(folder / "t.json")


@pytest.mark.parametrize("made", [deep, an_odd_regex])
def test_a_tokenizer_that_is_none_is_one_line(
    tmp_path: Path, made: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data.formats.encoders._LARGEST_TOKENIZER", 8 << 20)
    with pytest.raises(BadInputError) as refused:
        read_tokenizer(f"bpe:{made(tmp_path)}")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500
