"""Promise: files of others that are made to hang or to fill the memory end in one line, soon."""

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.data.corrupt import Corrupt
from trainer.data.formats import decode
from trainer.data.formats.encoders import read_tokenizer
from trainer.errors import BadInputError


@pytest.mark.parametrize("size", [65_535, 2**31 - 1])
def test_a_png_of_too_many_pixels_is_told_by_its_header(size: int) -> None:
    said = struct.pack(">IIBBBBB", size, size, 8, 0, 0, 0, 0)
    chunk = b"IHDR" + said
    png = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    with pytest.raises(Corrupt, match="too many"):
        decode.decode_whole(bytearray(png))


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
