"""Promise: files of others that are made to hang or to fill the memory end in one line, soon."""

import contextlib
import gc
import io
import json
import os
import struct
import tarfile
import weakref
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from tests.helpers.refusals import refused
from trainer import cli
from trainer.data.corrupt import Corrupt
from trainer.data.formats import audio, decode, files, tar_shards
from trainer.data.formats.arrow import ArrowImages, split_text
from trainer.data.formats.encoders import read_tokenizer
from trainer.data.formats.index import index_of
from trainer.data.formats.labels import labels_in
from trainer.data.formats.sharded import ShardFolder
from trainer.data.formats.tables import in_table
from trainer.data.formats.tar_shards import index_shards
from trainer.data.formats.tokenize import tokenize
from trainer.data.left_out import LeftOut
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
        files.Files(tmp_path, index_of([b"a/x.png"], [0], ["a"])).read(0)
    size = files.LARGEST_FILE + 1
    with (tmp_path / "s.tar").open("wb") as file:
        file.write(header("a.png", size))
        file.seek(512 + (size + 511) // 512 * 512)
        file.write(header("a.cls", 1) + padded(b"0") + _END)
    with pytest.raises(BadInputError, match=r"an image .* at most"):
        index_shards(tmp_path)


def test_a_tar_of_many_odd_members_is_added_up_while_it_is_read(tmp_path: Path) -> None:
    kinds = {"suffix": tarfile.REGTYPE, "pipe": tarfile.FIFOTYPE, "device": tarfile.CHRTYPE}
    with (tmp_path / "s.tar").open("wb") as file:
        for number in range(3000):
            kind = list(kinds)[number % 3]
            file.write(header(f"{number}.{kind}{number}", 0, kinds[kind]))
        file.write(_END)
    left_out: list[LeftOut] = []
    kept = []
    with contextlib.ExitStack() as reading:
        reading.enter_context(pytest.MonkeyPatch.context()).setattr(tar_shards, "_TALLIED", 100)
        for member in tar_shards.members(tmp_path / "s.tar", left_out):
            kept.append(weakref.ref(member))
            assert len(left_out) <= 101
    del member
    gc.collect()
    assert len(kept) == 1000 and not any(one() for one in kept)
    with pytest.raises(BadInputError, match="no sample with an image") as refused:
        index_shards(tmp_path)
    assert len(str(refused.value)) < 1500 and "other kinds" in str(refused.value)


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
        decode.decode_whole(bytearray(data[:-2] + scans * 3000 + data[-2:]))
    small = jpeg(8, 8)
    assert decode.decode_whole(bytearray(small)).shape == (1, 3, 8, 8)


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


PARQUET: dict[str, pyarrow.Table] = {
    "a page": pyarrow.table({"path": ["a" * (64 << 20)], "label": ["c"]}),
    "a label": pyarrow.table({"path": ["a"], "label": ["c" * (64 << 20)]}),
    "a dictionary": rows("a" * (1 << 20), "c", 20_000),
    "a dictionary of labels": rows("a", "c" * (1 << 20), 20_000),
    "a list": pyarrow.table({"path": ["a"], "label": [["c"] * 100_000]}),
    "shared beginnings": pyarrow.table(
        {"path": ["p" * 100_000 + str(i) for i in range(300)], "label": ["c"] * 300}
    ),
}


@pytest.mark.parametrize("made", PARQUET)
def test_parquet_that_inflates_is_refused(tmp_path: Path, made: str) -> None:
    file = tmp_path / "train.parquet"
    encoding = {"path": "DELTA_BYTE_ARRAY", "label": "PLAIN"} if made.startswith("shared") else None
    parquet.write_table(
        PARQUET[made], file, compression="zstd", use_dictionary=encoding is None, column_encoding=encoding
    )
    with refused(file, "label" if "label" in made or made == "a list" else "path"):
        in_table(file)


def test_a_text_of_parquet_is_held_once(tmp_path: Path) -> None:
    parquet.write_table(rows("a" * 100_000, "c", 4000), tmp_path / "train.parquet", store_schema=False)
    before = pyarrow.default_memory_pool()
    pool = pyarrow.proxy_memory_pool(before)
    pyarrow.set_memory_pool(pool)
    try:
        with refused(tmp_path / "train.parquet", "path"):
            in_table(tmp_path / "train.parquet")
    finally:
        pyarrow.set_memory_pool(before)
    assert pool.max_memory() < 64 << 20 < 4000 * 100_000


@pytest.mark.parametrize(
    "damaged",
    [b"\xff" * 64, b"\x1c" * 4096, b"\x19" * 4096, b"\x15\x01" * 8, b"\x19\xfc" + b"\xff" * 9],
    ids=range(5),
)
def test_a_header_of_a_parquet_page_that_is_none_is_one_line(tmp_path: Path, damaged: bytes) -> None:
    file = tmp_path / "train.parquet"
    parquet.write_table(
        pyarrow.table({"path": [f"{i}.png" for i in range(5000)], "label": ["c"] * 5000}), file
    )
    data = bytearray(file.read_bytes())
    data[4 : 4 + len(damaged)] = damaged
    file.write_bytes(data)
    with refused(file):
        in_table(file)


def test_a_folder_of_parquet_is_no_table(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").mkdir()
    with pytest.raises(BadInputError, match="is a folder, and a table one file"):
        in_table(tmp_path / "train.parquet")


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


def save(folder: Path, columns: dict[str, pyarrow.Array], compression: str | None = None) -> Path:
    """A split as `save_to_disk` writes it, in one file."""
    folder.mkdir()
    table, name = pyarrow.table(columns), "data-00000-of-00001.arrow"
    options = pyarrow.ipc.IpcWriteOptions(compression=compression)
    with pyarrow.ipc.new_stream(str(folder / name), table.schema, options=options) as to:
        to.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder / name


def lie(file: Path, true: int, said: int, form: str) -> None:
    """Writes another number wherever the file says `true`."""
    data = file.read_bytes()
    assert struct.pack(form, true) in data
    file.write_bytes(data.replace(struct.pack(form, true), struct.pack(form, said)))


_ROWS, _BYTES = 0x1234, 0x2345
_SAME = pyarrow.array(np.zeros(3000, np.int8))
_PICTURE = pyarrow.array([b"a" * _BYTES])
ARROW: dict[str, tuple[dict[str, pyarrow.Array], str]] = {
    "numbers": ({"image": pyarrow.array([{"bytes": 10**12}]), "label": pyarrow.array([0])}, "bytes: int64"),
    "twice": (
        {
            "image": pyarrow.StructArray.from_arrays([_PICTURE] * 2, ["bytes", "bytes"]),
            "label": pyarrow.array([0]),
        },
        "no encoded images",
    ),
    "a long type": (
        {"image": pyarrow.array([{"x" * 100_000: 1}]), "label": pyarrow.array([0])},
        "no encoded images",
    ),
    "many columns": ({f"{i}{'x' * 99}": pyarrow.array([1]) for i in range(2000)}, "no column 'image'"),
}


@pytest.mark.parametrize("made", ARROW)
def test_arrow_that_is_no_set_of_images_is_one_line(tmp_path: Path, made: str) -> None:
    columns, why = ARROW[made]
    save(tmp_path / "train", columns)
    with pytest.raises(BadInputError, match=why) as refused:
        ArrowImages(tmp_path / "train", "image", "label")
    assert len(str(refused.value)) < 2000 and "\n" not in str(refused.value)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
@pytest.mark.parametrize("of", ["rows", "a dictionary"])
def test_compressed_arrow_is_refused(tmp_path: Path, compression: str, of: str) -> None:
    large = pyarrow.array(["a" * 1000])
    columns = {"text": large if of == "rows" else pyarrow.DictionaryArray.from_arrays(_SAME[:1], large)}
    save(tmp_path / "train", columns, compression)
    with pytest.raises(BadInputError, match="compressed"):
        split_text(tmp_path / "train", "text")


@pytest.mark.parametrize("said", [1 << 30, (1 << 31) - 1, -1, -(1 << 31)])
@pytest.mark.parametrize("kind", ["binary", "struct", "string", "dictionary"])
def test_offsets_of_arrow_that_lead_elsewhere_are_refused(tmp_path: Path, kind: str, said: int) -> None:
    images, labels = _PICTURE, pyarrow.array(["a" * _ROWS])
    if kind == "struct":
        images = pyarrow.StructArray.from_arrays([images], ["bytes"])
    elif kind == "dictionary":
        labels = pyarrow.DictionaryArray.from_arrays(pyarrow.array([_ROWS]), labels, safe=False)
    file = save(tmp_path / "train", {"image": images, "label": labels})
    lie(file, _BYTES if kind in ("binary", "struct") else _ROWS, said, "<i")
    with pytest.raises(BadInputError, match="can't be read"):
        ArrowImages(tmp_path / "train", "image", "label")


@pytest.mark.parametrize("said", [1 << 30, -1])
def test_an_offset_between_others_is_looked_at(tmp_path: Path, said: int) -> None:
    images = pyarrow.array([b"a" * _BYTES, b"a" * _BYTES])
    labels = pyarrow.array(["c", "c"])
    lie(save(tmp_path / "train", {"image": images, "label": labels}), _BYTES, said, "<i")
    with pytest.raises(BadInputError, match="can't be read"):
        ArrowImages(tmp_path / "train", "image", "label")


@pytest.mark.parametrize("said", [1 << 20, 1 << 40, (1 << 63) - 1])
def test_more_rows_than_an_arrow_file_has_are_refused(tmp_path: Path, said: int) -> None:
    columns = {
        "image": pyarrow.nulls(_ROWS, pyarrow.binary()),
        "label": pyarrow.array(np.zeros(_ROWS, np.int8)),
    }
    lie(save(tmp_path / "train", columns), _ROWS, said, "<q")
    with pytest.raises(BadInputError, match="can't be read"):
        ArrowImages(tmp_path / "train", "image", "label")


def test_a_label_of_a_dictionary_is_held_once() -> None:
    labels = pyarrow.DictionaryArray.from_arrays(_SAME, pyarrow.array(["c" * 10_000]))
    found = labels_in(pyarrow.chunked_array([labels]))
    assert len(found) == 3000 and len(set(map(id, found))) == 1


@pytest.mark.parametrize("name", ["/dev/zero", "../other.arrow", "pipe", "a\0b"])
def test_files_of_arrow_are_regular_ones_beside_their_list(tmp_path: Path, name: str) -> None:
    save(tmp_path / "train", {"text": pyarrow.array(["a"])})
    os.mkfifo(tmp_path / "train" / "pipe")
    (tmp_path / "train" / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(BadInputError, match="isn't"):
        split_text(tmp_path / "train", "text")
    (tmp_path / "train" / "state.json").unlink()
    (tmp_path / "train" / "state.json").symlink_to("/dev/zero" if name == "/dev/zero" else "pipe")
    with pytest.raises(BadInputError, match="isn't a regular file"):
        split_text(tmp_path / "train", "text")
