"""Promise: every token is a target once an epoch; workers, start method and resume change nothing; a bad file
is one line.
"""

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from tests.helpers.batches import CPU, read_all, rows, source
from trainer.config.data import LoaderConfig
from trainer.data.dataset import NUM_ITEMS
from trainer.data.formats.documents import StreamDataset
from trainer.data.formats.tokens import TOKENS, TokenDataset, inputs_and_targets
from trainer.data.loader import RingLoader
from trainer.errors import BadInputError


def token_file(folder: Path, tokens: Any, dtype: str = "uint16") -> Path:
    path = folder / "train.bin"
    np.asarray(tokens, dtype).tofile(path)
    return path


@given(
    count=st.integers(2, 200),
    length=st.integers(1, 60),
    dtype=st.sampled_from(["uint16", "uint32"]),
    data=st.data(),
)
def test_each_token_is_a_target_once(
    tmp_path: Path, count: int, length: int, dtype: str, data: st.DataObject
) -> None:
    length = min(length, count - 1)
    tokens = np.arange(count) * 300 + 11
    dataset = TokenDataset(token_file(tmp_path, tokens, dtype), length, dtype)
    read = rows(dataset)
    assert read.dtype == dtype
    assert dataset.num_items == length
    assert read[:, 1:].ravel().tolist() == tokens[1 : len(dataset) * length + 1].tolist()
    assert read[:, 0].tolist() == tokens[: len(dataset) * length : length].tolist()
    assert count - 1 - len(dataset) * length < length, "no whole sample is left out"
    some = data.draw(st.lists(st.integers(0, len(dataset) - 1), min_size=1, max_size=9))
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
        samples = np.arange(begin, min(begin + of, len(dataset)))
        found: list[Any] = []
        for data in (dataset, memory):
            out: Any = {n: np.full((len(samples), *f.shape), 7, f.dtype) for n, f in data.fields.items()}
            data.read(samples, None, out)
            found.append(out)
        assert found[0].keys() == found[1].keys()
        assert all(np.array_equal(found[0][name], found[1][name]) for name in found[0])
        for row, valid in zip(found[0][TOKENS], found[0][NUM_ITEMS], strict=True):
            targets += row[1 : valid + 1].tolist()
    assert targets == tokens[1:].tolist()


def test_workers_and_resume_change_nothing(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 1 << 16, 1000)
    what = source(TokenDataset(token_file(tmp_path, tokens), 16, "uint16"), "cross", uniforms=0)
    batches = what.share.batches()
    expected = read_all(RingLoader(what, CPU, 0, LoaderConfig()), batches)
    assert len({batch[0] for batch in expected}) == len(batches)
    config = LoaderConfig(start_method="fork")
    assert read_all(RingLoader(what, CPU, 2, config), batches) == expected
    assert read_all(RingLoader(what, CPU, 0, config), batches[7:]) == expected[7:]


def test_a_file_cut_short_under_it_is_one_line(tmp_path: Path) -> None:
    """With a mapping this would be the end of the process."""
    path = token_file(tmp_path, np.arange(60_000))
    data = TokenDataset(path, 8, "uint16")
    os.truncate(path, 50_001)
    assert rows(data, [0])[0].tolist() == list(range(9))
    for sample in (25_000 // 8, len(data) - 1):
        with pytest.raises(
            BadInputError, match=r"can't be read .ends after [\d,]+ bytes.; .* nobody changes it"
        ):
            rows(data, [0, sample])


def test_the_fingerprint_tells_data_apart(tmp_path: Path) -> None:
    tokens = np.random.default_rng(1).integers(0, 100, 400)
    (tmp_path / "other").mkdir()
    print_of = TokenDataset(token_file(tmp_path, tokens), 16, "uint16").fingerprint()
    assert TokenDataset(token_file(tmp_path / "other", tokens), 16, "uint16").fingerprint() == print_of
    assert print_of.startswith("24 samples ")
    others = {
        TokenDataset(token_file(tmp_path, tokens), 15, "uint16").fingerprint(),
        TokenDataset(token_file(tmp_path, tokens), 8, "uint32").fingerprint(),
        TokenDataset(token_file(tmp_path, [*tokens, 0]), 16, "uint16").fingerprint(),
        *(
            TokenDataset(token_file(tmp_path, tokens + (np.arange(400) == i)), 16, "uint16").fingerprint()
            for i in (0, 200, 399)
        ),
    }
    assert len(others - {print_of}) == 6
    long, longer = (TokenDataset(token_file(tmp_path, tokens), n, "uint16") for n in (210, 220))
    assert len(long) == len(longer) == 1
    assert long.fingerprint() != longer.fingerprint()


def test_inputs_and_targets() -> None:
    tokens = torch.tensor([[1, 2, 65535], [4, 5, 6]]).to(torch.uint16)
    x, y = inputs_and_targets(tokens)
    assert (x.tolist(), y.tolist()) == ([[1, 2], [4, 5]], [[2, 65535], [5, 6]])
    for part in (x, y):
        assert part.dtype == torch.int64
        assert part.is_contiguous()


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
    ("content", "beside", "dtype", "message"),
    [
        (b"123", None, "uint16", "3 bytes are no whole number of uint16 tokens"),
        (FIFTY[:16], None, "uint16", "8 tokens are too few for a sample of 8"),
        (NUMPY.getvalue(), None, "uint16", "NumPy"),
        (LLM_C + MANY[:10_000], None, "uint16", "llm.c .*1,024"),
        (b"\x1f\x8b\x08\0" + MANY, None, "uint16", "gzip"),
        (MANY + bytes(70_000), None, "uint16", "65,536"),
        (FIFTY, None, None, "uint16 or uint32.* no train.bin.json .*trainer data tokenize"),
        (FIFTY, facts(), "uint32", "train.bin.json says uint16, not uint32"),
        (FIFTY[:-2], facts(), None, "98 bytes, but train.bin.json says 50 tokens of uint16"),
        (FIFTY, b"", None, r"train.bin.json: not JSON \(line 1"),
        (FIFTY, b"[]", None, "train.bin.json: all of it"),
        (FIFTY, facts(tokens="-"), None, "train.bin.json: tokens: Field required"),
        (FIFTY, facts(dtype="int8"), None, "train.bin.json: dtype: "),
        (FIFTY, b"[" * 100_000, None, "train.bin.json: nested too deeply"),
        (None, None, "uint16", "train.bin: can't be opened"),
        ("fifo", None, "uint16", "train.bin: can't be opened .isn't a file"),
    ],
)
def test_a_bad_file_is_one_line(
    tmp_path: Path, content: Any, beside: bytes | None, dtype: str | None, message: str
) -> None:
    path = tmp_path / "train.bin"
    if content == "fifo":
        os.mkfifo(path)
    elif content is not None:
        path.write_bytes(content)
    if beside is not None:
        (tmp_path / "train.bin.json").write_bytes(beside)
    with pytest.raises(BadInputError, match=message) as caught:
        TokenDataset(path, 8, dtype)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_token_beyond_the_vocabulary_is_one_line(tmp_path: Path) -> None:
    """On a GPU it would be an assertion in some kernel, and the end of the process."""
    tokens = np.arange(50)
    tokens[30] = 100
    path = token_file(tmp_path, tokens)
    (tmp_path / "train.bin.json").write_bytes(facts())
    data = TokenDataset(path, 7)
    assert data.vocabulary == 100
    assert rows(data, [0]).max() == 7
    with pytest.raises(BadInputError, match="sample 4 holds token 100, but the vocabulary is 100"):
        rows(data)
