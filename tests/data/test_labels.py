"""Promise: a label is a name or a whole number from 0 on, the same wherever it stands; what can't be meant is
refused with its row and value.
"""

import datetime
import decimal
import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from tests.helpers.refusals import refused
from trainer.data.formats import tables
from trainer.data.formats.labels import LabelError, label_of, numbered
from trainer.data.formats.tables import in_table
from trainer.errors import BadInputError, first_line

DATE = datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)
# What is no label, however it is stored, and what is said of it.
REFUSED: list[tuple[Any, str]] = [
    (-1, "-1 is negative"),
    (-3.0, "-3.0 is negative"),
    (float("nan"), "nan stands for a missing value"),
    (float("inf"), "inf stands for a missing value"),
    (1.5, "1.5 isn't a whole number"),
    (np.float32(0.1), "isn't a whole number"),
    (2.0**60, "too large a float"),
    (decimal.Decimal("2.50"), "2.50 isn't a whole number"),
    (None, "is empty"),
    ("", "is empty"),
    (" \ufeff", "is empty"),
    ("nan", "stands for a missing value"),
    ("<NA>", "stands for a missing value"),
    ("-1", "-1 is negative"),
    ("1.5", "1.5 isn't a whole number"),
    ("1.5e-03", "isn't a whole number"),
    ("a\0b", "zero byte"),
    ("cat\r\nb.jpg,dog", "holds a line break"),  # a table whose quote isn't closed in its row
    ([0, 1], "is a list"),
    ({"a": 1}, "is a dict"),
    (b"x", "is a bytes"),
    (DATE, "is a datetime"),
]
TAKEN: list[tuple[Any, str]] = [
    (7, "7"),
    (7.0, "7"),
    (np.int8(3), "3"),
    (np.float16(3.0), "3"),
    (decimal.Decimal("10"), "10"),
    (True, "True"),
    ("cat", "cat"),
    ("007", "007"),
    ("1e4 runs", "1e4 runs"),
    ("nancy", "nancy"),
    ("日本", "日本"),
]


@pytest.mark.parametrize(("value", "why"), REFUSED)
def test_what_cannot_be_meant_is_no_label(value: Any, why: str) -> None:
    with pytest.raises(LabelError) as refused:
        label_of(value)
    assert why in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(("value", "text"), TAKEN)
def test_names_and_whole_numbers_are_labels(value: Any, text: str) -> None:
    assert label_of(value) == text


@pytest.mark.parametrize(
    ("labels", "numbers", "classes"),
    [
        (
            ["0.0", "5.0", "10.0", "5"],
            [0, 5, 10, 5],
            [str(n) for n in range(11)],
        ),  # as pandas writes integers
        (["10", "9", "0"], [10, 9, 0], [str(n) for n in range(11)]),
        (["20200101", "20190101"], [1, 0], ["20190101", "20200101"]),  # dates are names
        (["1.0e+01", "2"], [10, 2], [str(n) for n in range(11)]),
        (["b", "a", "b"], [1, 0, 1], ["a", "b"]),
        (["007", "7a"], [0, 1], ["007", "7a"]),
    ],
)
def test_numbers_are_sorted_by_value(labels: list[str], numbers: list[int], classes: list[str]) -> None:
    assert numbered(labels) == (numbers, classes)


@pytest.mark.parametrize(
    "pair",
    [("é", "e\u0301"), ("cat", "cat "), ("cat", "cat\u00a0"), ("cat", "\ufeffcat"), ("a b", "a  b")],
)
def test_names_that_look_alike_are_told_apart(pair: tuple[str, str]) -> None:
    with pytest.raises(LabelError, match="can hardly be told from") as refused:
        numbered([pair[0], "dog", pair[1]])
    assert refused.value.at == 2 and str(refused.value).isascii()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("path,label\na.jpg,x\nb.jpg,Smith, Jane\n", "line 3: 3 2"),
        ("path,label\na.jpg\n", "line 2: 1 2"),
        ("path,label,label\na.jpg,0,1\n", "'label' 2"),
        ("path,label\na.jpg,-1\n", "line 2: -1"),
        ("path,label\na.jpg,0\nb.jpg,nan\n", "line 3: 'nan'"),
        ("path,label\na.jpg,0.5\n", "line 2: 0.5"),
        ("path,label\na.jpg,\n", "line 2:"),
        ("path,label\na.jpg,caf\u00e9\nb.jpg,cafe\u0301\n", "line 3: 'cafe\\u0301'"),
        ("path,klass\na.jpg,1\n", "'label' 'klass'"),
        ("path,label\n", "rows"),
        ("", "'path'"),
        ('path,label\n"a.jpg,1\n', "line"),
        ('"a"b,label\n', "'path'"),
        ('"path";"label"\n"a.jpg";"cat"\n', "';'"),
        ("path;label\na.jpg;0\n", "';'"),
        ("path\tlabel\na.jpg\t0\n", "'\\t'"),
        ("path,label\na\0.jpg,1\n", "line"),
        ("<!DOCTYPE html>\n<p>Not found\n", "HTML"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "Git LFS"),
        ("path,label\na.jpg,0\n".encode("utf-16"), "UTF-16"),
    ],
)
def test_a_csv_that_cannot_be_meant_is_one_line(tmp_path: Path, text: str | bytes, names: str) -> None:
    file = tmp_path / "train.csv"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with refused(file, names) as raised:
        in_table(file)
    assert " at 0x" not in str(raised.value)


@pytest.mark.parametrize(
    ("column", "why"),
    [
        (pyarrow.array([0, -1]), "row 2: label -1 is negative"),
        (pyarrow.array([0.0, float("nan")]), "row 2: label nan"),
        (pyarrow.array([0.0, 1.5]), "row 2: label 1.5 isn't a whole number"),
        (pyarrow.array([0, None]), "row 2: path or label is empty"),
        (pyarrow.array([[0], [1]]), "row 1: label [0] is of type list"),
        (pyarrow.array([{"a": 1}, {"a": 2}]), "is of type struct"),
        (pyarrow.array([b"x", b"y"]), "is of type binary"),
        (pyarrow.array([DATE, DATE]), "is of type timestamp"),
        (pyarrow.array([decimal.Decimal("1.0"), decimal.Decimal("1.5")]), "row 2: label 1.5"),
        (pyarrow.array(["a", "<NA>"]).dictionary_encode(), "row 2: label '<NA>'"),
    ],
)
def test_a_parquet_table_that_cannot_be_meant_is_one_line(tmp_path: Path, column: Any, why: str) -> None:
    file = tmp_path / "train.parquet"
    parquet.write_table(pyarrow.table({"path": ["a.jpg", "b.jpg"], "label": column}), file)
    with pytest.raises(BadInputError) as refused:
        in_table(file)
    assert why in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "column",
    [
        pyarrow.array([0.0, 5.0, 10.0]),
        pyarrow.array([0, 5, 10], pyarrow.uint8()),
        pyarrow.array([decimal.Decimal(0), decimal.Decimal(5), decimal.Decimal(10)]),
        pyarrow.array(["0.0", "5.0", "10.0"]).dictionary_encode(),
        pyarrow.array(["0", "5", "10"], pyarrow.large_string()),
    ],
)
def test_numbers_are_the_same_classes_however_they_are_stored(tmp_path: Path, column: Any) -> None:
    file = tmp_path / "train.parquet"
    parquet.write_table(pyarrow.table({"path": ["a", "b", "c"], "label": column}), file)
    table = in_table(file)
    assert (table.labels[0], table.labels[1], table.labels[2]) == (0, 5, 10)
    assert table.classes[5] == "5" and len(table.classes) == 11


def test_of_a_parquet_table_only_two_columns_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 3000
    embedding = pyarrow.array([b"e" * 20_000] * rows)
    table = pyarrow.table({"x": embedding, "path": ["a"] * rows, "label": [0, 1, 2] * 1000})
    file = tmp_path / "train.parquet"
    parquet.write_table(table, file, use_dictionary=False, compression="none", row_group_size=500)
    del table, embedding
    most, real = [0], tables._pair

    def watched(*given: Any) -> Any:
        most[0] = max(most[0], pyarrow.total_allocated_bytes())
        return real(*given)

    before = pyarrow.total_allocated_bytes()
    monkeypatch.setattr(tables, "_pair", watched)
    assert len(in_table(file)) == rows
    assert most[0] - before < 4 << 20 < file.stat().st_size


def test_a_second_parquet_file_behind_the_first_is_found(tmp_path: Path) -> None:
    """The footer of the last is read, and only its rows: half of the data would be gone."""
    parts = []
    for number in range(2):
        part = io.BytesIO()
        parquet.write_table(pyarrow.table({"path": [f"{number}.jpg"] * 3, "label": [0, 1, 2]}), part)
        parts.append(part.getvalue())
    file = tmp_path / "train.parquet"
    file.write_bytes(b"".join(parts))
    with pytest.raises(BadInputError) as refused:
        in_table(file)
    assert "\n" not in str(refused.value)


def test_the_first_line_of_an_error_is_the_same_each_time() -> None:
    assert first_line(ValueError("  \nnot <object at 0x7f00aa> it\nmore")) == "not <object> it"
    assert first_line(KeyError()) == "KeyError"
