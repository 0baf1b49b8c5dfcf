"""Contract of tables: labels are names or whole numbers; what can't be meant is refused with its row."""

import datetime
import decimal
import io
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from torch.nn import functional as F

from tests.helpers.batches import arrays_of
from tests.helpers.image_folders import SIDE, encoded, opened, picture
from tests.helpers.planted import put
from tests.helpers.refusals import named, refused
from trainer.config.data import DataConfig
from trainer.config.model import ModelConfig
from trainer.config.tasks import RegularizationConfig
from trainer.data.batch import Batch
from trainer.data.check import CheckedData, check_data
from trainer.data.formats.images import ImageDataset
from trainer.data.formats.labels import LabelError, label_of, numbered
from trainer.data.formats.tables import in_table
from trainer.data.sources import check_alike, load_images, more_images
from trainer.tasks.classification import Classification

DATE = datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)

# A value, and the label that it is; or what is told of one that is none, of row 2.
LABELS: list[tuple[Any, str | None, str]] = [
    (7, "7", ""),
    (7.0, "7", ""),
    (np.float16(3.0), "3", ""),
    (decimal.Decimal("10"), "10", ""),
    (True, "True", ""),
    ("007", "007", ""),
    ("1e4 runs", "1e4 runs", ""),
    ("nancy", "nancy", ""),
    (-3.0, None, "-3.0"),
    (float("nan"), None, "nan"),
    (float("inf"), None, "inf"),
    (1.5, None, "1.5"),
    (2.0**60, None, "float"),
    (decimal.Decimal("2.50"), None, "2.50"),
    (None, None, "empty"),
    (" \ufeff", None, "empty"),
    ("<NA>", None, "'<NA>'"),
    ("-1", None, "-1"),
    ("1.5e-03", None, "0.0015"),
    ("a\0b", None, "zero"),
    ("cat\r\nb.jpg,dog", None, "line"),  # a table whose quote isn't closed in its row
    ([0, 1], None, "list"),
    (b"x", None, "bytes"),
    (DATE, None, "datetime"),
]


@pytest.mark.parametrize(("value", "text", "told"), LABELS)
def test_names_and_whole_numbers_are_labels(value: Any, text: str | None, told: str) -> None:
    with nullcontext() if text else refused(told, by=LabelError) as raised:
        assert label_of(value) == text
    assert raised is None or "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("labels", "numbers", "classes"),
    [
        (["0.0", "5.0", "10.0", "5"], [0, 5, 10, 5], [str(n) for n in range(11)]),  # as pandas has integers
        (["1.0e+01", "2"], [10, 2], [str(n) for n in range(11)]),
        (["20200101", "20190101"], [1, 0], ["20190101", "20200101"]),  # dates are names
        (["b", "a", "b"], [1, 0, 1], ["a", "b"]),
        (["007", "7a"], [0, 1], ["007", "7a"]),
    ],
)
def test_numbers_are_sorted_by_value(labels: list[str], numbers: list[int], classes: list[str]) -> None:
    assert numbered(labels) == (numbers, classes)


@pytest.mark.parametrize("pair", [("é", "e\u0301"), ("cat", "cat "), ("cat", "\ufeffcat"), ("a b", "a  b")])
def test_names_that_look_alike_are_told_apart(pair: tuple[str, str]) -> None:
    with refused(by=LabelError) as raised:
        numbered([pair[0], "dog", pair[1]])
    assert cast(Any, raised.value).at == 2 and str(raised.value).isascii()


def parquet_of(label: Any, path: Any = ("a.jpg", "b.jpg"), **how: Any) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"path": path, "label": label}), file, **how)
    return file.getvalue()


DAMAGED = bytearray(parquet_of(["c"] * 5000, [f"{n}.png" for n in range(5000)]))
DAMAGED[4:68] = b"\xff" * 64

# id: the content of a table, or its labels and the number of its classes, or what is told of it.
TABLES: dict[str, tuple[bytes, Sequence[int], int, str]] = {
    "csv floats": (b"path,label\nx,0.0\n\ny,5.0\nz,10\n", [0, 5, 10], 11, ""),
    "csv names": (b"label,path\ndog,x.jpg\ncat,y.jpg\n", [1, 0], 2, ""),
    "csv of Excel": (b"\xef\xbb\xbfpath,label\nx,20240201\ny,20240131\nz,007\n", [2, 1, 0], 3, ""),
    "csv in Latin-1": (b"path,label\nx.jpg,caf\xe9\n", [0], 1, ""),
    "csv more cells": (b"path,label\na.jpg,x\nb.jpg,Smith, Jane\n", [], 0, "line 3: 3 2"),
    "csv fewer cells": (b"path,label\na.jpg\n", [], 0, "line 2: 1 2"),
    "csv one name twice": (b"path,label,label\na.jpg,0,1\n", [], 0, "'label' 2"),
    "csv negative": (b"path,label\na.jpg,-1\n", [], 0, "line 2: -1"),
    "csv missing": (b"path,label\na.jpg,0\nb.jpg,nan\n", [], 0, "line 3: 'nan'"),
    "csv empty": (b"path,label\na.jpg,\n", [], 0, "line 2:"),
    "csv alike": ("path,label\na,caf\u00e9\nb,cafe\u0301\n".encode(), [], 0, "line 3: 'cafe\\u0301'"),
    "csv no label": (b"path,klass\na.jpg,1\n", [], 0, "'label' 'klass'"),
    "csv no rows": (b"path,label\n", [], 0, "rows"),
    "csv nothing": (b"", [], 0, "'path'"),
    "csv open quote": (b'path,label\n"a.jpg,1\n', [], 0, "line"),
    "csv semicolons": (b"path;label\na.jpg;0\n", [], 0, "';'"),
    "csv tabs": (b"path\tlabel\na.jpg\t0\n", [], 0, "'\\t'"),
    "csv zero byte": (b"path,label\na\0.jpg,1\n", [], 0, "line"),
    "csv page": (b"<!DOCTYPE html>\n<p>Not found\n", [], 0, "HTML"),
    "csv UTF-16": ("path,label\na.jpg,0\n".encode("utf-16"), [], 0, "UTF-16"),
    "parquet twice": (parquet_of([0, 1]) * 2, [], 0, "parquet"),  # half of the rows
    "parquet floats": (parquet_of([0.0, 5.0]), [0, 5], 6, ""),
    "parquet decimals": (parquet_of([decimal.Decimal(0), decimal.Decimal(5)]), [0, 5], 6, ""),
    "parquet dictionary": (parquet_of(pyarrow.array(["0.0", "5.0"]).dictionary_encode()), [0, 5], 6, ""),
    "parquet large text": (parquet_of(pyarrow.array(["0", "5"], pyarrow.large_string())), [0, 5], 6, ""),
    "parquet negative": (parquet_of([0, -1]), [], 0, "row 2: -1"),
    "parquet fraction": (parquet_of([0.0, 1.5]), [], 0, "row 2: 1.5"),
    "parquet nothing": (parquet_of([0, None]), [], 0, "row 2:"),
    "parquet lists": (parquet_of([[0], [1]]), [], 0, "row 1: [0] list"),
    "parquet dates": (parquet_of([DATE, DATE]), [], 0, "timestamp"),
    "parquet missing": (parquet_of(pyarrow.array(["a", "<NA>"]).dictionary_encode()), [], 0, "row 2: '<NA>'"),
    "parquet damaged": (bytes(DAMAGED), [], 0, "parquet"),
}


@pytest.mark.parametrize("made", TABLES)
def test_what_is_read_of_a_table(made: str, tmp_path: Path) -> None:
    content, labels, classes, told = TABLES[made]
    file = tmp_path / f"train.{made.split(maxsplit=1)[0]}"
    file.write_bytes(content)
    if told:
        with refused(file, told) as raised:
            in_table(file)
        assert " at 0x" not in str(raised.value) and len(str(raised.value)) < 1000
        return
    table = in_table(file)
    assert table.labels.tolist() == labels and len(table.classes) == classes
    str(table.classes).encode()


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_missing_files_are_counted(kind: str, photographs: Path, tmp_path: Path) -> None:
    def check(table: Any) -> None:
        check_data("fast", False, [CheckedData("training", ImageDataset(table, SIDE, random_crop=True), 0)])

    records = opened(kind, photographs, tmp_path)
    check(records)
    paths = [records.file_name(n).decode() for n in range(30)]
    paths[16] = "a/gone.jpg"
    paths.insert(4, "two\nlines.jpg")
    file = tmp_path / f"table.{kind}"
    content = b"path,label\n" + "".join(f'"{path}",1\n' for path in paths).encode()
    file.write_bytes(content if kind == "csv" else parquet_of([1] * 31, paths))
    place = "line 7" if kind == "csv" else "row 5"
    with refused("2 of 31", file, f"{place}: {tmp_path}/two lines.jpg", by=Exception):
        check(in_table(file))


def tables(root: Path, train: Sequence[tuple[str, Any]], val: Sequence[tuple[str, Any]]) -> Any:
    for part, rows in (("train", train), ("val", val)):
        write(root, f"{part}.csv", [f"{path},{label}" for path, label in rows])
    return load_images(DataConfig(name="table", path=root), 0)


@pytest.mark.parametrize(
    ("train", "val", "numbers"),
    [("abc", "ca", [2, 0]), (range(0, 1344, 28), [1260], [1260]), ([5, 100_000], [5, 5], [0, 0])],
)
def test_val_has_the_numbers_of_train(tmp_path: Path, train: Any, val: Any, numbers: list[int]) -> None:
    data = tables(tmp_path, *([(f"{n}{i}", x) for i, x in enumerate((train, val)[n])] for n in (0, 1)))
    assert data.evaluation.labels.tolist() == numbers
    assert [data.classes[number] for number in data.evaluation.labels] == [str(each) for each in val]
    assert named(data.notes, "val")


def test_an_evaluation_set_is_numbered_by_the_names_of_train(tmp_path: Path) -> None:
    data = tables(tmp_path, [("a.jpg", "ant"), ("b.jpg", "bee")], [("c.jpg", "ant"), ("d.jpg", "bee")])
    config = DataConfig(name="table", path=tmp_path)
    for label in ("bee", "cat"):
        more, classes = more_images(config, write(tmp_path, "more.csv", [f"e.jpg,{label}"]).stem, 0)
        with refused("cat") if label == "cat" else nullcontext():
            check_alike(more, classes, data.evaluation, data.classes)
            assert cast(Any, more).labels.tolist() == [1]


@pytest.mark.parametrize(("two", "told"), [("02", "1 of 3 '1'"), (["a|b", "b"], "data.label_separator 1 2")])
def test_odd_classes_are_noted(two: Sequence[str], told: str, tmp_path: Path) -> None:
    (note,) = tables(tmp_path, [*zip("ab", two, strict=True)], [*zip("cd", two, strict=True)]).notes
    assert named(note, told)


def test_files_with_two_labels_and_files_of_both_parts_are_counted(tmp_path: Path) -> None:
    train = [("a.jpg", "ant"), ("./b.jpg", "bee"), ("b.jpg", "ant"), ("a.jpg", "ant"), ("b.jpg", "bee")]
    val = [("c.jpg", "ant"), (f"{tmp_path}/a.jpg", "ant"), ("d.jpg", "bee"), ("b.jpg", "bee")]
    labels, both = tables(tmp_path, train, val).notes
    assert named(labels, "1 train b.jpg")
    assert named(both, "2 4 val", tmp_path / "a.jpg")
    assert not tables(tmp_path, train[:2], [("c.jpg", "ant"), ("d.jpg", "bee")]).notes


def write(root: Path, name: str, rows: Sequence[str]) -> Path:
    (root / name).write_text("path,label\n" + "".join(f"{row}\n" for row in rows))
    return root / name


@pytest.mark.parametrize(
    ("files", "train", "others", "count"),
    [
        ("i/a.jpg i/b.jpg", ["i/a.jpg"], {}, 1),
        ("i/a.jpg i/b.jpg i/c.jpg", ["i/a.jpg"], {"val.csv": ["i/b.jpg"], "test.csv": ["./i/c.jpg"]}, 0),
        ("train/x/a.jpg train/y/b.jpg train/z/c.jpg val/a.jpg", ["train/x/a.jpg", "train/y/b.jpg"], {}, 1),
        ("a.jpg b.jpg deep/c.jpg", ["a.jpg"], {}, 2),
        ("i/a.jpg i/b.txt i/c.heic i/.d.jpg j/b.jpg", ["i/a.jpg"], {}, 0),
        ("i/a.jpg i/b.jpg", ["{root}/i/a.jpg"], {}, 1),
        ("i/a.jpg i/b.jpg", ["i/a.jpg"], {"broken.csv": ["", "x"]}, 1),
        ("i/a.jpg more/b.jpg", ["more/../i/a.jpg", "more/b.jpg"], {}, 0),
    ],
)
def test_unnamed_images(files: str, train: list[str], others: Any, count: int, tmp_path: Path) -> None:
    root = put(tmp_path / "d", *files.split(), content=bytes(encoded(picture(), "JPEG")))
    for name, paths in others.items():
        write(root, name, [f"{path},a" for path in paths])
    found = in_table(write(root, "train.csv", [f"{path.format(root=root)},a" for path in train]))
    assert (sum(each.count for each in found.left_out), len(found)) == (count, len(train))


TRAIN = ["cat|dog", "dog", "emu|cat", "", "dog | cat"]
VAL = ["emu", "dog", "dog|emu"]
CLASSES = ("cat", "dog", "emu")


@pytest.fixture(params=["separator", "columns", "parquet", "parquet columns"])
def data(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """The same images and classes, written in four ways."""
    kind, pixels = cast(str, request.param), np.random.default_rng(0)
    for part, rows in (("train", TRAIN), ("val", VAL)):
        table: dict[str, list[Any]] = {"path": [f"{part}{number}.png" for number in range(len(rows))]}
        for name in table["path"]:
            Image.fromarray(pixels.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(tmp_path / name)
        if "columns" in kind:
            table |= {each: [int(each in row) for row in rows] for each in CLASSES}
        else:
            table["label"] = list(rows)
        if "parquet" in kind:
            parquet.write_table(pyarrow.table(table), tmp_path / f"{part}.parquet")
        else:
            lines = [",".join(map(str, row)) for row in (table, *zip(*table.values(), strict=True))]
            (tmp_path / f"{part}.csv").write_text("\n".join(lines))
    how: dict[str, Any] = {"label_columns": [*CLASSES]} if "columns" in kind else {"label_separator": "|"}
    sizes = {"image_size": 8, "global_batch_size": 4, "micro_batch_size": 4, "workers": 0}
    return {"name": "table", "path": tmp_path, **how, **sizes}


def told(rows: Sequence[str]) -> list[list[int]]:
    return [[int(name in row) for name in CLASSES] for row in rows]


def test_each_class_of_an_image_is_a_one(data: dict[str, Any]) -> None:
    images = load_images(DataConfig(**data), 0)
    assert images.classes == CLASSES
    for part, rows in ((images.train, TRAIN), (images.evaluation, VAL)):
        assert arrays_of(part, random=0.5 if part.uniforms else None)[0]["label"].tolist() == told(rows)
    assert named(images.notes, "cat val")


def test_the_loss_is_the_binary_cross_entropy_of_a_sigmoid(data: dict[str, Any]) -> None:
    def task_of(**keys: Any) -> Classification:
        return Classification(DataConfig(**data), ModelConfig(), RegularizationConfig(**keys), 0)

    task, label = task_of(), torch.tensor(told(TRAIN), dtype=torch.uint8)
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    model: Any = lambda image: logits[: len(image)]  # noqa: E731
    fields = {"image": torch.zeros(5, 8, 8, 3, dtype=torch.uint8), "label": label}
    found = task.measure(model, Batch(fields, torch.tensor([1.0, 1, 1, 1, 0]), None, 4))
    wanted = F.binary_cross_entropy_with_logits(logits[:4], label[:4].float()) * 4
    torch.testing.assert_close(found["loss"], wanted)
    assert found["accuracy"] == ((logits.sigmoid() > 0.5) == label.bool()).all(1)[:4].sum()
    fields["label"], logits[:] = torch.zeros_like(label), float("nan")
    assert task.measure(model, Batch(fields, None, None, 5))["accuracy"] == 0
    with refused("regularization.label_smoothing"):
        task_of(label_smoothing=0.1)


def test_the_fingerprint_tells_sets_of_classes_apart(tmp_path: Path) -> None:
    seen, config = set[str](), DataConfig(name="table", path=tmp_path, label_separator="|")
    write(tmp_path, "val.csv", ["v.png,a|b"])
    for labels in ("a b a|b", "b a a|b", "a|b b a", "a|b b b", "a a b"):
        write(tmp_path, "train.csv", [f"{n}.png,{label}" for n, label in enumerate(labels.split())])
        seen.add(load_images(config, 0).train.fingerprint())
    assert len(seen) == 5


def test_what_is_neither_is_named(tmp_path: Path) -> None:
    put(tmp_path, "train.csv", "val.csv", content=b"path,cat,dog\na.png,1,0\nb.png,1,2\n")
    for column, names in (("dog", "line 3 dog 2"), ("emu", "emu")):
        with refused(tmp_path / "train.csv", names):
            load_images(DataConfig(name="table", path=tmp_path, label_columns=["cat", column]), 0)
    single = load_images(DataConfig(name="table", path=tmp_path, label_columns=["cat"]), 0)
    assert single.notes and not named(single.notes, "data.path")  # one class of several is no slip
    for other in ({"name": "folder"}, {"label_columns": ["cat"]}, {"class_weights": "balanced"}):
        with pytest.raises(ValueError, match=r"data\.label_separator"):
            DataConfig.model_validate({"name": "table", "label_separator": "|", **other})
