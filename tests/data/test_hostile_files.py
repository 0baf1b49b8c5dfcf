"""Promise: files of others that are made to hang or to fill the memory end in one line, soon."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.data.formats.encoders import read_tokenizer
from trainer.errors import BadInputError


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
