"""Promise: `trainer data tokenize` writes what the tokenizer says of each whole document, and never half."""

import io
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.helpers.batches import arrays_of, rows
from tests.helpers.forked import replace
from tests.helpers.planted import put
from tests.helpers.refusals import named, refused
from trainer.cli import main
from trainer.data.dataset import NUM_ITEMS
from trainer.data.formats import encoders, tokenize as module
from trainer.data.formats.chat import open_tokenizer
from trainer.data.formats.conversations import RowSplit
from trainer.data.formats.documents import StreamDataset
from trainer.data.formats.tokenize import tokenize, unread_files
from trainer.data.formats.tokenized import tokenized
from trainer.data.formats.tokens import TOKENS, TokenDataset, read_about, verify_tokens
from trainer.errors import BadInputError

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of 400 tokens, and settings for sentences that must not matter."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([Path(__file__).read_text()], trainer)
    made.enable_truncation(5)
    made.enable_padding(length=7)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    made.save(str(path))
    return path


def ids_of(bpe: Path, text: str) -> list[int]:
    made = tokenizers.Tokenizer.from_file(str(bpe))
    made.no_truncation()
    made.no_padding()
    made.encode_special_tokens = True
    return list(made.encode(text, add_special_tokens=False).ids)


def folder_of(root: Path, texts: dict[str, bytes]) -> Path:
    for name, text in texts.items():
        put(root / "text", name, content=text)
    return root / "text"


def test_bytes_of_a_folder(tmp_path: Path) -> None:
    texts = {"b.txt": b"bb\xff", "a/z.txt": b"z", "a.txt": b"", "x\udcff": b"\0", ".git/x": b"n", ".y": b"n"}
    target = tmp_path / "made" / "here" / "train.bin"
    tokenize(folder_of(tmp_path, texts), target, "bytes")
    expected = [256, *b"z", 256, *b"bb\xff", 256, 0, 256]
    assert np.fromfile(target, np.uint16).tolist() == expected
    about = verify_tokens(target, lambda _: None)
    assert (about.tokens, about.documents, about.vocabulary, about.end_of_document) == (9, 4, 257, 256)
    assert (about.tokenizer, about.tokenizer_sha256, about.source[:8]) == ("bytes", None, "4 files ")
    assert sorted(path.name for path in target.parent.iterdir()) == ["train.bin", "train.bin.json"]
    (tmp_path / "text" / "more").symlink_to(tmp_path / "made")
    left_out = {one.reason: (one.count, one.first) for one in unread_files(tmp_path / "text", "**/*")}
    assert left_out == {"hidden file{s}": (2, ".git/x"), "link{s} to a folder": (1, "more")}
    data = TokenDataset(target, 4)
    assert data.vocabulary == 257 and rows(data).tolist() == [expected[:5], expected[4:]]


def test_evaluation_data_among_the_rest_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder_of(tmp_path, {"my-train.txt": b"a", "my-valid.txt": b"b"})
    asked = ["data", "tokenize", str(source), str(tmp_path / "t.bin"), "--tokenizer", "bytes", "--force"]
    for pattern, told in (("**/*", True), ("*train*", False)):
        assert main([*asked, "--files", pattern]) == 0
        assert named(capsys.readouterr().err, source / "my-valid.txt") is told


PARTS = [*"ab \n\n\t.é😀\r\u00a0", "<|endoftext|>", "def ", "x\n", "=\n"]
WORDS = st.lists(st.sampled_from(PARTS), max_size=400).map("".join)


@given(texts=st.lists(WORDS, min_size=1, max_size=4), piece=st.sampled_from([1, 5, 40]))
def test_no_piece_changes_a_token(tmp_path: Path, bpe: Path, texts: list[str], piece: int) -> None:
    shutil.rmtree(tmp_path / "text", ignore_errors=True)
    folder = folder_of(tmp_path, {str(number): text.encode() for number, text in enumerate(texts)})
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("PIECE_CHARACTERS", piece), ("_AROUND", 20), ("_BATCH_CHARACTERS", 30)):
            patch.setattr(encoders, name, value)
        patch.setattr(module, "_CHUNK", 3)
        tokenize(folder, tmp_path / "t.bin", f"bpe:{bpe}", force=True)
    end = tokenizers.Tokenizer.from_file(str(bpe)).token_to_id("<|endoftext|>")
    expected = [token for text in texts for token in [*ids_of(bpe, text), end]]
    assert np.fromfile(tmp_path / "t.bin", np.uint16).tolist() == expected


def test_a_tokenizer_that_minds_cuts_gets_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that puts a blank before each text it is given: whole, or refused where that is too much."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "▁": 2, "</s>": 3, "?": 4}, "?"))
    made.normalizer = tokenizers.normalizers.Prepend("▁")
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.save(str(tmp_path / "t.json"))
    (tmp_path / "x.txt").write_text("a\nb\n" * 500)
    monkeypatch.setattr(encoders, "PIECE_CHARACTERS", 50)
    call = tmp_path / "x.txt", tmp_path / "t.bin", f"bpe:{tmp_path / 't.json'}"
    tokenize(*call)
    read = np.fromfile(tmp_path / "t.bin", np.uint16).tolist()
    assert (read.count(2), read[-1]) == (1, 3)
    monkeypatch.setattr(encoders, "_LONGEST", 1000)
    with refused(tmp_path / "x.txt"):
        tokenize(*call, force=True)


@pytest.mark.parametrize(("largest", "dtype"), [(65535, "uint16"), (65536, "uint32")])
def test_the_dtype_fits_the_vocabulary(tmp_path: Path, largest: int, dtype: str) -> None:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": largest, "end": 1, "?": 0}, "?"))
    made.save(str(tmp_path / "t.json"))
    (tmp_path / "x.txt").write_text("a")
    tokenize(tmp_path / "x.txt", tmp_path / "t.bin", f"bpe:{tmp_path / 't.json'}", end="end")
    about = read_about(tmp_path / "t.bin")
    assert about is not None and (about.dtype, about.vocabulary) == (dtype, largest + 1)
    assert np.fromfile(tmp_path / "t.bin", dtype).tolist() == [largest, 1]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"source": "missing"}, "missing:"),
        ({"pattern": "*.md"}, "text: *.md"),
        ({"pattern": "/etc/*"}, "--files /etc/*"),
        ({"tokenizer": "words"}, "--tokenizer words"),
        ({"tokenizer": "bpe:none.json"}, "none.json:"),
        ({"tokenizer": "bpe:text/a.txt"}, "text/a.txt: tokenizer.json"),
        ({"tokenizer": "bytes", "end": "x"}, "--end bpe"),
        ({"tokenizer": "bpe:more/whole.json", "end": "nope"}, "whole.json: nope"),
        ({"tokenizer": "bpe:more/none.json"}, "none.json: token"),
        ({"tokenizer": "bpe:more/two.json"}, "two.json: <|endoftext|> </s>"),
        ({"tokenizer": "bpe:more/deep.json"}, "deep.json:"),
        ({"tokenizer": "bpe:more/regex.json"}, "regex.json:"),
        ({"tokenizer": "bpe:more/whole.json"}, "latin: 0xe9 1500003"),
        ({"source": "cut", "tokenizer": "bpe:more/whole.json"}, "cut: 0xc3 2"),
        ({"target": "text/t.bin"}, "t.bin:"),
        ({"source": "text/a.txt", "target": "text/a.txt", "force": True}, "a.txt:"),
        ({"target": "old.bin"}, "old.bin: --force"),
        ({"target": "half.bin"}, "half.bin.json:"),
        ({"target": "old.bin/x.bin"}, "x.bin:"),
        ({"source": "links"}, "links/dead:"),
    ],
)
def test_what_cannot_be_tokenized(
    tmp_path: Path, bpe: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], names: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder_of(tmp_path, {"a.txt": b"a", "latin": "ü".encode() * 750_000 + b"caf\xe9s"[:3] + b"\xe9s"})
    for name in ("links", "more"):
        Path(name).mkdir()
    Path("links/dead").symlink_to("nowhere")
    Path("cut").write_bytes(b"ab\xc3")
    put(tmp_path, "old.bin", "half.bin.json", content=b"old")
    whole = json.loads(bpe.read_text())
    (added,) = whole["added_tokens"]
    known = {token: number for token, number in whole["model"]["vocab"].items() if token != "<|endoftext|>"}
    split = {"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": False}
    kinds = {"whole": {}, "two": {"added_tokens": [added, added | {"id": 400, "content": "</s>"}]}}
    kinds |= {"none": {"added_tokens": [], "model": whole["model"] | {"vocab": known}}}
    for name, changes in {**kinds, "regex": {"pre_tokenizer": split}}.items():
        Path(f"more/{name}.json").write_text(json.dumps(whole | changes))
    Path("more/deep.json").write_bytes(b'{"model":' + b"[" * 1_000_000)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    call: dict[str, Any] = {"source": "text", "target": "t.bin", "tokenizer": "bytes"} | arguments
    with refused(names) as raised:
        tokenize(**call | {"source": Path(call["source"]), "target": Path(call["target"])})
    assert len(str(raised.value)) < 500
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
    assert Path("old.bin").read_text() == "old"


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.txt").write_bytes(b"new")
    (tmp_path / "t.bin").write_text("old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with refused("t.bin: space"):
        tokenize(tmp_path / "x.txt", tmp_path / "t.bin", "bytes", force=True)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"t.bin": "old", "x.txt": "new"}


def _killed(folder: Path, after: str) -> None:
    if after == "chunk":
        whole = module._chunks

        def chunks(*arguments: Any) -> Iterator[bytes]:
            yield next(whole(*arguments))
            os.kill(os.getpid(), signal.SIGKILL)

        replace(module, "_chunks", chunks)
    else:

        def once(path: Path, to: Path) -> None:
            path.rename(to)
            os.kill(os.getpid(), signal.SIGKILL)

        replace(Path, "replace", once)
    tokenize(folder / "new.txt", folder / "t.bin", "bytes", force=True)


@pytest.mark.parametrize(("after", "there"), [("chunk", b"old"), ("rename", b"new")])
def test_a_kill_leaves_a_whole_file(tmp_path: Path, after: str, there: bytes) -> None:
    for name in ("old", "new"):
        (tmp_path / f"{name}.txt").write_text(name)
    target = tmp_path / "t.bin"
    tokenize(tmp_path / "old.txt", target, "bytes")
    process = multiprocessing.get_context("fork").Process(target=_killed, args=(tmp_path, after))
    process.start()
    process.join(300)
    assert process.exitcode == -signal.SIGKILL
    assert np.fromfile(target, np.uint16).tolist() == [*there, 256]
    if after == "chunk":
        verify_tokens(target, lambda _: None)
    else:  # without its JSON file it isn't misread
        with pytest.raises(BadInputError, match="give the dtype"):
            TokenDataset(target, 2)
    tokenize(tmp_path / "new.txt", target, "bytes", force=True)
    verify_tokens(target, lambda _: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.txt", "old.txt", "t.bin", "t.bin.json"]


def test_what_was_changed_is_found(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("hello")
    target, beside = tmp_path / "t.bin", tmp_path / "t.bin.json"
    tokenize(tmp_path / "x.txt", target, "bytes")
    verify_tokens(target, lambda _: None)
    content = target.read_bytes()
    target.write_bytes(content[:4] + bytes([content[4] ^ 1]) + content[5:])
    with refused(target, beside.name):
        verify_tokens(target, lambda _: None)
    beside.unlink()
    with refused(beside.name):
        verify_tokens(target, lambda _: None)


@pytest.mark.parametrize(
    ("model", "text", "said"),
    [
        ({}, "abé", "'é'"),
        ({"unk_token": "</s>"}, "abé", "</s>"),
        ({"dropout": 0.1}, "ab", "dropout 0.1"),
        ({"unk_token": "<unk>"}, "abé", [0, 1, 3, 2]),
        ({"unk_token": "</s>"}, "ab", [0, 1, 2]),
        ({}, "ab\u0301\n", [0, 1, 2]),
    ],
)
def test_no_letter_is_lost(model: dict[str, Any], text: str, said: str | list[int], tmp_path: Path) -> None:
    vocabulary = {"a": 0, "b": 1, "</s>": 2, "<unk>": 3}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], **model))
    of = tokenizers.normalizers
    made.normalizer = of.Sequence([of.NFD(), of.StripAccents()] if "\u0301" in text else [])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text").write_text(text)
    call = tmp_path / "text", tmp_path / "t.bin", f"bpe:{tmp_path / 'tokenizer.json'}"
    if isinstance(said, str):
        with refused(said):
            tokenize(*call)
        assert not (tmp_path / "t.bin").exists()
    else:
        assert tokenize(*call).unknown == said.count(3)
        assert np.fromfile(tmp_path / "t.bin", np.uint16).tolist() == said


@pytest.mark.parametrize(
    "model",
    [
        tokenizers.models.WordLevel({"?": 0, "a": 1}, unk_token="?"),
        tokenizers.models.Unigram([("?", 0.0), ("a", -1.0), (" ", -1.0)], 0, False),
    ],
)
def test_what_a_vocabulary_lacks(model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (tmp_path / "text").write_text("a z a q")
    asked = [str(tmp_path / "text"), str(tmp_path / "t.bin"), "--tokenizer", f"bpe:{tmp_path}/tokenizer.json"]
    assert main(["data", "tokenize", *asked]) == 0
    about = read_about(tmp_path / "t.bin")
    assert about is not None and about.unknown == 2 and named(capsys.readouterr().out, "2")
    (tmp_path / "a.jsonl").write_text('{"text": "a z a q"}\n{"text": "z ? a"}\n{"text": "a</s>a"}\n')
    found = tokenized(RowSplit((tmp_path / "a.jsonl",)), open_tokenizer(tmp_path), "all", 9)
    assert found.notes[1].startswith("3 ") and named(found.notes[2], "1 a.jsonl: line 3: </s>")


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
