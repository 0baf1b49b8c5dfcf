"""Promise: files of others that are made to hang or to fill the memory end in one line, soon."""

import io
import json
import os
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from trainer import cli
from trainer.data.corrupt import Corrupt
from trainer.data.formats import audio, decode, files
from trainer.data.formats.encoders import read_tokenizer
from trainer.data.formats.sharded import ShardFolder
from trainer.data.formats.tables import in_table
from trainer.data.formats.tar_shards import index_shards
from trainer.data.formats.tokenize import tokenize
from trainer.errors import BadInputError

_END = bytes(1024)


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def named(name: str) -> bytes:
    return header("././@LongLink", len(name) + 1, b"L") + padded(name.encode() + b"\0") + header("x", 0)


TARS: dict[str, bytes] = {
    **{f"header {kind!r}": header("x", 3 << 30, kind) for kind in (b"x", b"g", b"L", b"K", b"X")},
    "headers for headers": b"".join(header("x", 2, b"L") + padded(b"a\0") for _ in range(5000)),
    "a length of 20 digits": header("x", 25, b"x") + padded(b"99999999999999999999 a=b\n") + _END,
    "a deep name": named("d/" * 100_000 + "a.png") + _END,
    "a long name": named("a" * 100_000 + ".png") + _END,
}


@pytest.mark.parametrize("made", TARS)
def test_a_tar_that_says_much_is_read_up_to_a_bound(tmp_path: Path, made: str) -> None:
    with (tmp_path / "s.tar").open("wb") as file:
        file.write(TARS[made])
        if made.startswith("header b"):
            file.truncate(4 << 30)  # holes
    with pytest.raises(BadInputError, match=r"s\.tar: ") as refused:
        index_shards(tmp_path)
    assert len(str(refused.value)) < 500 and "\n" not in str(refused.value)


def test_an_image_of_gigabytes_is_no_image(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with (tmp_path / "a" / "x.png").open("wb") as file:
        file.truncate(files.LARGEST_FILE + 1)
    with pytest.raises(BadInputError, match=r"an image .* at most"):
        files.Files(tmp_path, [b"a/x.png"], [0], ["a"]).read(0)
    size = files.LARGEST_FILE + 1
    with (tmp_path / "s.tar").open("wb") as file:
        file.write(header("a.png", size))
        file.seek(512 + (size + 511) // 512 * 512)
        file.write(header("a.cls", 1) + padded(b"0") + _END)
    with pytest.raises(BadInputError, match=r"an image .* at most"):
        index_shards(tmp_path)


def test_a_pipe_is_no_shard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "s.tar")
    assert cli.main(["data", "index", str(tmp_path)]) == 2
    assert "no .tar files" in capsys.readouterr().err
    with pytest.raises(OSError, match="isn't a file"):
        ShardFolder(tmp_path).open(type("Shard", (), {"name": "s.tar"})())


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
        decode.whole(bytearray(data[:-2] + scans * 3000 + data[-2:]))
    small = jpeg(8, 8)
    assert decode.whole(bytearray(small)).shape == (1, 3, 8, 8)


@pytest.mark.parametrize("filling", [b"\xff", b"\xff\xe0\0\0"])
def test_a_header_is_looked_for_in_bounded_time(filling: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_SEGMENTS", 10)
    found = decode.look(b"\xff\xd8\xff" + filling * 20 + jpeg(8, 8)[3:])
    assert found.kind == "other"


@pytest.mark.parametrize("size", [65_535, 2**31 - 1])
def test_a_png_of_too_many_pixels_is_told_by_its_header(size: int) -> None:
    said = struct.pack(">IIBBBBB", size, size, 8, 0, 0, 0, 0)
    chunk = b"IHDR" + said
    png = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    with pytest.raises(Corrupt, match="too many"):
        decode.whole(bytearray(png))


def test_a_tag_before_gigabytes_is_not_taken_off_in_memory(tmp_path: Path) -> None:
    with (tmp_path / "x.wav").open("wb") as file:
        file.write(b"ID3\4\0\0\0\0\0\0fLaC")
        file.truncate(8 << 30)
    with (tmp_path / "x.wav").open("rb") as file, pytest.raises(Corrupt, match="ID3"):
        audio._without_tag(file.fileno(), 8 << 30)


def zero(_: Path) -> str:
    return "/dev/zero"


def deep(folder: Path) -> str:
    (folder / "t.json").write_bytes(b'{"model":' + b"[" * 1_000_000)
    return str(folder / "t.json")


def nested(folder: Path) -> str:
    normalizer = '{"type":"Sequence","normalizers":[' * 100_000
    (folder / "t.json").write_text('{"version":"1.0","normalizer":' + normalizer)
    return str(folder / "t.json")


def an_odd_regex(folder: Path) -> str:
    split = {"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": False}
    (folder / "t.json").write_text(json.dumps({"version": "1.0", "pre_tokenizer": split}))
    return str(folder / "t.json")


@pytest.mark.parametrize("made", [zero, deep, nested, an_odd_regex])
def test_a_tokenizer_that_is_none_is_one_line(
    tmp_path: Path, made: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data.formats.encoders._LARGEST_TOKENIZER", 8 << 20)
    with pytest.raises(BadInputError) as refused:
        read_tokenizer(f"bpe:{made(tmp_path)}")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500


def rows(path: str, label: str, count: int) -> pyarrow.Table:
    """As many rows, all alike, in a few hundred bytes."""
    same = pyarrow.array(np.zeros(count, np.int32))
    columns = {"path": path, "label": label}
    made = {
        name: pyarrow.DictionaryArray.from_arrays(same, pyarrow.array([one])) for name, one in columns.items()
    }
    return pyarrow.table(made)


PARQUET: dict[str, tuple[pyarrow.Table, str]] = {
    "a page": (pyarrow.table({"path": ["a" * (64 << 20)], "label": ["c"]}), "column 'path' holds more than"),
    "a label": (pyarrow.table({"path": ["a"], "label": ["c" * (64 << 20)]}), "column 'label' holds more"),
    "a dictionary": (rows("a" * (1 << 20), "c", 20_000), "column 'path' holds more|more than 4,096 letters"),
    "a dictionary of labels": (rows("a", "c" * (1 << 20), 20_000), "more than 4,096 letters|column 'label'"),
    "rows": (rows("a", "c", 2_000_000), "2,000,000 rows in"),
    "a list": (pyarrow.table({"path": ["a"], "label": [["c"] * 100_000]}), "column 'label' holds more"),
    "shared beginnings": (
        pyarrow.table({"path": ["p" * 100_000 + str(i) for i in range(300)], "label": ["c"] * 300}),
        "column 'path' holds more",
    ),
}


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("made", PARQUET)
def test_parquet_that_inflates_is_refused(tmp_path: Path, made: str, folder: bool) -> None:
    file = tmp_path / "train.parquet"
    table, why = PARQUET[made]
    if folder:
        file.mkdir()
    encoding = {"path": "DELTA_BYTE_ARRAY", "label": "PLAIN"} if made.startswith("shared") else None
    parquet.write_table(
        table,
        file / "a.parquet" if folder else file,
        compression="zstd",
        use_dictionary=encoding is None,
        column_encoding=encoding,
    )
    with pytest.raises(BadInputError, match=why) as refused:
        in_table(file)
    assert len(str(refused.value)) < 500


def test_a_folder_of_parquet_has_labels_in_its_names(tmp_path: Path) -> None:
    for label in ("dog", "cat"):
        (tmp_path / "train.parquet" / f"label={label}").mkdir(parents=True)
        place = tmp_path / "train.parquet" / f"label={label}" / "a.parquet"
        parquet.write_table(pyarrow.table({"path": [f"{label}.png"]}), place)
    files = in_table(tmp_path / "train.parquet")
    assert [files.file_name(row) for row in (0, 1)] == [b"cat.png", b"dog.png"]
    assert list(files.classes) == ["cat", "dog"]


@pytest.mark.parametrize("rule", ["pre_tokenizer", "normalizer"])
def test_a_regular_expression_that_backtracks_is_one_line(tmp_path: Path, rule: str) -> None:
    pattern = {"pattern": {"Regex": "(a+)+$"}}
    rules = {
        "pre_tokenizer": {"type": "Split", "behavior": "Isolated", "invert": False, **pattern},
        "normalizer": {"type": "Replace", "content": "x", **pattern},
    }
    model = {"type": "BPE", "vocab": {"</s>": 0, "a": 1, "b": 2}, "merges": []}
    file = tmp_path / "t.json"
    file.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model, rule: rules[rule]}))
    (tmp_path / "x.txt").write_text("a" * 2000 + "b")
    with pytest.raises(BadInputError, match=r"rules fail on a text .*retry-limit"):
        tokenize(tmp_path / "x.txt", tmp_path / "o" / "x.bin", f"bpe:{file}")
    assert not list((tmp_path / "o").iterdir())
