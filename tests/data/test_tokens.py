"""Promise: every token is a target once an epoch, and a bad file is one line."""

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.helpers.batches import arrays_of, rows
from tests.helpers.refusals import refused
from trainer.data.dataset import NUM_ITEMS
from trainer.data.formats.documents import StreamDataset
from trainer.data.formats.tokens import TOKENS, TokenDataset


def token_file(folder: Path, tokens: Any, dtype: str = "uint16") -> Path:
    path = folder / "train.bin"
    np.asarray(tokens, dtype).tofile(path)
    return path


@given(count=st.integers(2, 200), length=st.integers(1, 60), dtype=st.sampled_from(["uint16", "uint32"]))
def test_each_token_is_a_target_once(tmp_path: Path, count: int, length: int, dtype: str) -> None:
    length, tokens = min(length, count - 1), np.arange(count) * 300 + 11
    dataset = TokenDataset(token_file(tmp_path, tokens, dtype), length, dtype)
    read, whole = rows(dataset), len(dataset) * length
    assert (read.dtype, dataset.num_items) == (dtype, length)
    assert read[:, 1:].ravel().tolist() == tokens[1 : whole + 1].tolist()
    assert read[:, 0].tolist() == tokens[:whole:length].tolist()
    assert count - 1 - whole < length, "no whole sample is left out"
    some = [*range(0, len(dataset), 2), 0]
    assert (rows(dataset, some) == read[some]).all()


@given(count=st.integers(2, 200), length=st.integers(1, 60), of=st.integers(1, 7))
def test_what_is_measured_goes_to_the_last_token(tmp_path: Path, count: int, length: int, of: int) -> None:
    """As a text in memory of the same tokens: its rest is a sample of its own, whatever is read at once."""
    tokens = np.arange(count) * 300 + 11
    dataset = TokenDataset(token_file(tmp_path, tokens), length, "uint16", whole=True)
    memory = StreamDataset(tokens.astype(np.uint16), length, whole=True)
    assert len(dataset) == len(memory) == -(-(count - 1) // length)
    targets = list[int]()
    for begin in range(0, len(dataset), of):
        samples = range(begin, min(begin + of, len(dataset)))
        found, expected = (arrays_of(data, samples)[0] for data in (dataset, memory))
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], expected[name]) for name in found)
        for row, valid in zip(found[TOKENS], found[NUM_ITEMS], strict=True):
            targets += row[1 : valid + 1].tolist()
    assert targets == tokens[1:].tolist()


def test_a_file_cut_short_under_it_is_one_line(tmp_path: Path) -> None:
    path = token_file(tmp_path, np.arange(60_000))
    data = TokenDataset(path, 8, "uint16")
    os.truncate(path, 50_001)
    assert rows(data, [0])[0].tolist() == list(range(9))
    for sample in (25_000 // 8, len(data) - 1):
        with refused(path):
            rows(data, [0, sample])


def test_the_fingerprint_tells_data_apart(tmp_path: Path) -> None:
    tokens = np.random.default_rng(1).integers(0, 100, 400)

    def mark(tokens: Any, length: int = 16, dtype: str = "uint16", folder: Path = tmp_path) -> str:
        return TokenDataset(token_file(folder, tokens, dtype), length, dtype).fingerprint()

    (tmp_path / "other").mkdir()
    assert mark(tokens) == mark(tokens, folder=tmp_path / "other") and mark(tokens).startswith("24 samples ")
    others = [mark(tokens + (np.arange(400) == at)) for at in (0, 200, 399)]
    others += [mark(tokens), mark(tokens, 15), mark(tokens, 8, "uint32"), mark([*tokens, 0])]
    others += [mark(tokens, 210), mark(tokens, 220)]  # of one sample each
    assert len(set(others)) == 9


def facts(**change: Any) -> bytes:
    whole = {
        "dtype": "uint16", "vocabulary": 100, "tokens": 50, "documents": 1, "end_of_document": 99,
        "tokenizer": "x", "tokenizer_sha256": None, "source": "1 files 0", "sha256": "0",
    }  # fmt: skip
    return json.dumps({name: value for name, value in (whole | change).items() if value != "-"}).encode()


FIFTY = np.arange(50, dtype=np.uint16).tobytes()
MANY = np.arange(50_000, dtype=np.uint16).tobytes()
LLM_C = np.array([20240520, 1, 5000, *[0] * 253], "<i4").tobytes()
NUMPY = io.BytesIO()
np.save(NUMPY, np.arange(500, dtype=np.uint16))


@pytest.mark.parametrize(
    ("content", "beside", "dtype", "names"),
    [
        (b"123", None, "uint16", "3 uint16"),
        (FIFTY[:16], None, "uint16", "8 8"),
        (NUMPY.getvalue(), None, "uint16", "NumPy"),
        (LLM_C + MANY[:10_000], None, "uint16", "llm.c 1,024"),
        (b"\x1f\x8b\x08\0" + MANY, None, "uint16", "gzip"),
        (MANY + bytes(70_000), None, "uint16", "65,536"),
        (FIFTY, None, None, "uint16 uint32 train.bin.json"),
        (FIFTY, facts(), "uint32", "train.bin.json uint16 uint32"),
        (FIFTY[:-2], facts(), None, "98 train.bin.json 50 uint16"),
        (FIFTY, b"", None, "train.bin.json: JSON"),
        (FIFTY, b"[]", None, "train.bin.json:"),
        (FIFTY, facts(tokens="-"), None, "train.bin.json: tokens:"),
        (FIFTY, facts(dtype="int8"), None, "train.bin.json: dtype:"),
        (FIFTY, b"[" * 100_000, None, "train.bin.json:"),
        (None, None, "uint16", ""),
        ("fifo", None, "uint16", ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, bytes) else None,
)
def test_bad_files(tmp_path: Path, content: Any, beside: bytes | None, dtype: str | None, names: str) -> None:
    path = tmp_path / "train.bin"
    if content == "fifo":
        os.mkfifo(path)
    elif content is not None:
        path.write_bytes(content)
    if beside is not None:
        (tmp_path / "train.bin.json").write_bytes(beside)
    with refused(path, names):
        TokenDataset(path, 8, dtype)
