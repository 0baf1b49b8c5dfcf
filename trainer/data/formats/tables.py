"""Image files listed in a table, CSV or Parquet, with the columns path and label."""

import contextlib
import csv
import os
import sys
from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer.config.data import DataConfig
from trainer.data.formats.arrow import import_pyarrow
from trainer.data.formats.files import IMAGES, Files, ListFile, unlisted
from trainer.data.formats.index import Index, index_folder, index_of, kept
from trainer.data.formats.labels import LabelError, label_of, labels_in, numbered, quoted
from trainer.data.formats.signatures import what_it_is
from trainer.data.left_out import LeftOut
from trainer.data.shared import names_in
from trainer.errors import BadInputError, first_line, reading
from trainer.host.files import hash_of_rest, read_at

_LABEL = ("label",)
_JOINT = "\0"  # between the classes of an image that has several
_SEPARATORS = ";\t|"
_NAMED = 20  # columns in a message
_LARGE = 10_000  # rows of a table whose list is kept
_ROWS = 4096  # rows that are read at once
_MAGIC = b"PAR1"  # at the start and end of a Parquet file
_HEAD = 4096

_Row = tuple[int, bytes, str]


def table_split(config: DataConfig, path: Path, split: str) -> Files:
    """Opens `path/split.parquet` or `path/split.csv`, see `in_table`.

    Raises:
        BadInputError: If neither or both exist, or the table is invalid.
    """
    parquet, text = path / f"{split}.parquet", path / f"{split}.csv"
    if parquet.exists() and text.exists():
        raise BadInputError(
            f"{path}: holds {parquet.name} and {text.name}, and one is read; remove the other"
        )
    if not parquet.exists() and not text.exists() and path.is_dir():
        others = sorted(entry.name for entry in path.iterdir() if entry.name.startswith(f"{split}."))
        if others:
            raise BadInputError(f"{path}: no {text.name} or {parquet.name} (there is {quoted(others[0])})")
    several = SeveralClasses(config.label_separator or "", tuple(config.label_columns or ()))
    return in_table(parquet if parquet.exists() else text, several, index_folder(config.index))


class SeveralClasses(NamedTuple):
    """How a table names several classes of an image: by a separator, or by columns of 0 and 1."""

    separator: str = ""
    columns: tuple[str, ...] = ()

    @property
    def wanted(self) -> tuple[str, ...]:
        """Columns with the classes."""
        return self.columns or _LABEL

    def text(self, where: str, values: Sequence[Any]) -> str:
        """Returns the classes of a row as one text.

        Raises:
            BadInputError: If a value is neither 0 nor 1.
            LabelError: If there is no valid label.
        """
        if self.columns:
            return _JOINT.join(
                name for name, value in zip(self.columns, values, strict=True) if _is_one(where, name, value)
            )
        if not self.separator or not isinstance(values[0], str):
            return label_of(values[0])
        parts = (part.strip() for part in values[0].split(self.separator))
        return _JOINT.join(dict.fromkeys(label_of(part) for part in parts if part))


def _is_one(where: str, column: str, value: Any) -> bool:
    text = str(value).strip().lower()
    if text not in ("0", "1", "0.0", "1.0", "false", "true"):
        raise BadInputError(f"{where}: column {quoted(column)} is {quoted(value)}, neither 0 nor 1")
    return text in ("1", "1.0", "true")


def in_table(
    file: Path,
    several: SeveralClasses = SeveralClasses(),  # noqa: B008  (a tuple)
    indexes: Path | None = None,
) -> Files:
    """Opens a CSV or Parquet file with the columns path and label; paths are relative to its folder.

    Labels are class names, or numbers; the classes are then 0 to the largest number.

    Args:
        file: The table.
        several: How it names several classes of an image.
        indexes: Folder in which the list of a large table is kept; None: it isn't.

    Raises:
        BadInputError: If the table can't be read, lacks a column, or has an invalid row.
    """
    unit, rows = ("row", _parquet) if file.suffix == ".parquet" else ("line", _csv)
    if file.is_dir():
        raise BadInputError(f"{file}: is a folder, and a table one file; write its parts into one")
    made_from: list[Any] = ["table", unit, several]
    with reading(file), file.open("rb") as opened:
        made_from.append(hash_of_rest(opened))
    index = kept(indexes, made_from, lambda: _listed(file, several, unit, rows(file, several)), _LARGE)
    index = index._replace(left_out=_unlisted(file, index, several))
    return Files(file.parent, index, ListFile(file, unit))


def _listed(file: Path, several: SeveralClasses, unit: str, rows: Iterator[_Row]) -> Index:
    lines, paths, labels = array("q"), list[bytes](), list[str]()
    with reading(file):
        for line, path, label in rows:
            lines.append(line)
            paths.append(path)
            labels.append(sys.intern(label))  # one string per class instead of one per row
    if not paths:
        raise BadInputError(f"{file}: holds no rows")
    together, names = bool(several.separator or several.columns), labels
    if together:
        names = sorted({name for text in set(labels) for name in text.split(_JOINT) if name})
        if not names:
            raise BadInputError(f"{file}: no row has a class")
    try:
        numbers, classes = numbered(names)
    except LabelError as error:
        at = next(at for at, text in enumerate(labels) if names[error.at] in text.split(_JOINT))
        raise BadInputError(f"{file}: {unit} {lines[at]}: {error}; write both alike") from error
    more = dict[str, Any]()
    if together:
        classes = list(several.columns) or classes
        index = (
            {name: classes.index(name) for name in names}
            if several.columns
            else dict(zip(names, numbers, strict=True))
        )
        distinct = sorted(set(labels))
        more["sets"] = sets = np.zeros((len(distinct), len(classes)), np.uint8)
        for row, text in enumerate(distinct):
            sets[row, [index[name] for name in text.split(_JOINT) if name]] = 1
        number = {text: row for row, text in enumerate(distinct)}
        numbers = [number[text] for text in labels]
    return index_of(paths, numbers, classes, number=np.asarray(lines, np.int64))._replace(more=more)


def _unlisted(file: Path, index: Index, several: SeveralClasses) -> list[LeftOut]:
    """Counts the images beside those of a table that neither it nor another table of its folder names.

    The innermost folder that holds all images of the table is searched. If it isn't below the table's folder,
    only the folders of the images are: it may be the whole disk.
    """
    root = os.path.abspath(os.fsencode(file.parent))  # noqa: PTH100  (bytes)
    paths = names_in(index.columns)
    folders = {path.rpartition(b"/")[0] for path in paths}
    places = {os.path.normpath(os.path.join(root, folder)) for folder in folders}  # noqa: PTH118
    top = os.path.commonpath(places)
    count = partial(unlisted, f"image{{s}} that {file.name} doesn't name", file.parent, IMAGES, paths)
    others = [each for each in file.parent.iterdir() if each.suffix in (".csv", ".parquet") and each != file]
    named = [_paths(other, several) for other in others]
    if top == root or top.startswith(root + b"/"):
        return count(*named, below=(top[len(root) + 1 :],))
    return count(*named, below=[os.path.relpath(place, root) for place in places], deep=False)


def _paths(file: Path, several: SeveralClasses) -> Iterator[bytes]:
    with contextlib.suppress(BadInputError, OSError):  # not a table of images, or another split's fault
        rows = _parquet(file, several) if file.suffix == ".parquet" else _csv(file, several)
        yield from (path for _, path, _ in rows)


def _csv(file: Path, several: SeveralClasses) -> Iterator[_Row]:
    with file.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as text:
        table = csv.reader(text, strict=True)
        try:
            columns = next(table, [])
            path, *rest = _columns_of(file, columns, several.wanted)
            for cells in table:
                if not cells:
                    continue
                where = f"{file}: line {table.line_num}"
                if len(cells) != len(columns):
                    raise BadInputError(
                        f"{where}: {len(cells)} cells, and there are {len(columns)} columns; put what holds "
                        "a comma into quotes, and add what is missing"
                    )
                yield table.line_num, *_pair(where, cells[path], [cells[at] for at in rest], several)
        except csv.Error as error:
            if table.line_num < 2:  # the header: not text, or "path";"label"
                head = _head(file).decode("utf-8-sig", "replace").splitlines()[:1]
                _columns_of(file, head, several.wanted)
            raise BadInputError(f"{file}: line {table.line_num}: {error}") from error


def _parquet(file: Path, several: SeveralClasses) -> Iterator[_Row]:
    pyarrow, number, wanted = import_pyarrow(file), 0, ["path", *several.wanted]
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            _columns_of(file, table.schema_arrow.names, several.wanted)
            groups = map(table.metadata.row_group, range(table.metadata.num_row_groups))
            chunks = (group.column(number) for group in groups for number in range(group.num_columns))
            _check_one(file, sum(chunk.total_compressed_size for chunk in chunks))
            # Other columns may be large, or of a type that pyarrow can't read.
            for batch in table.iter_batches(_ROWS, columns=wanted, use_threads=False):
                labels = zip(*(labels_in(batch.column(name)) for name in several.wanted), strict=True)
                for path, values in zip(batch.column("path").to_pylist(), labels, strict=True):
                    number += 1
                    yield number, *_pair(f"{file}: row {number}", path, values, several)
    except LabelError as error:
        raise BadInputError(f"{file}: row {number + 1}: {error}") from error
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        what = what_it_is(_head(file))
        reason = what if what and what != "Parquet" else first_line(error)
        raise BadInputError(f"{file}: not a readable Parquet file ({reason})") from error


def _check_one(file: Path, pages: int) -> None:
    """Checks that a file isn't two that were concatenated, of which pyarrow reads the last footer.

    Args:
        file: The file.
        pages: Bytes of the pages that the footer knows.

    Raises:
        BadInputError: If it is.
    """
    with file.open("rb") as opened:
        rest = read_at(opened.fileno(), len(_MAGIC) + pages, file.stat().st_size)
    if (at := rest.find(2 * _MAGIC)) >= 0:
        raise BadInputError(
            f"{file}: a second Parquet file begins at byte {2 * len(_MAGIC) + pages + at:,}; take them "
            "apart, or write the rows into one"
        )


def _columns_of(file: Path, columns: Sequence[str], labels: Sequence[str]) -> list[int]:
    """Returns the positions of the path and of the labels.

    Raises:
        BadInputError: If a column is missing or occurs twice.
    """
    for wanted in ("path", *labels):
        if columns.count(wanted) > 1:
            raise BadInputError(f"{file}: column '{wanted}' is there {columns.count(wanted)} times; keep one")
        if wanted not in columns:
            raise BadInputError(f"{file}: no column '{wanted}'{_hint(file, columns)}")
    return [columns.index(wanted) for wanted in ("path", *labels)]


def _hint(file: Path, columns: Sequence[str]) -> str:
    """Returns a hint why a column is missing, and the columns that exist."""
    what = what_it_is(head := _head(file))
    if what not in ("", "Parquet") and not what.startswith("text that begins"):
        return f": this is {what}"
    if b"\0" in head and what != "Parquet":
        return ": this is text in UTF-16: save it as UTF-8"
    for separator in _SEPARATORS:
        if len(columns) == 1 and separator in columns[0]:
            return f": cells are separated by {separator!r}; save it with commas"
    return f" (it has: {', '.join(map(quoted, columns[:_NAMED])) or 'none'}{', …' * (len(columns) > _NAMED)})"


def _head(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(_HEAD)


def _pair(where: str, path: Any, labels: Sequence[Any], several: SeveralClasses) -> tuple[bytes, str]:
    label = labels[0]
    if path in (None, "", b"") or (label in (None, "") and several == SeveralClasses()):
        raise BadInputError(f"{where}: path or label is empty")
    if not isinstance(path, str | bytes):
        raise BadInputError(f"{where}: path {quoted(path)} is no text")
    path = os.fsencode(path)
    if b"\0" in path:
        raise BadInputError(f"{where}: a path can't hold a zero byte")
    try:
        return path, several.text(where, labels)
    except LabelError as error:
        raise BadInputError(f"{where}: {error}; leave it out, or give it a class") from error
