"""Promise: `trainer data tokenize` writes what the tokenizer says of each whole document, and never half."""

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

from tests.helpers.batches import rows
from tests.helpers.forked import replace
from tests.helpers.planted import put
from tests.helpers.refusals import named, refused
from trainer.cli import main
from trainer.data.formats import encoders, tokenize as module
from trainer.data.formats.chat import open_tokenizer
from trainer.data.formats.conversations import RowSplit
from trainer.data.formats.tokenize import tokenize
from trainer.data.formats.tokenized import tokenized
from trainer.data.formats.tokens import TokenDataset, read_about, verify_tokens
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
    data = TokenDataset(target, 4)
    assert data.vocabulary == 257 and rows(data).tolist() == [expected[:5], expected[4:]]


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
