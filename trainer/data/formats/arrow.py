"""Folders that Hugging Face's `datasets` writes by `save_to_disk`: Arrow files for each split.

They are read by pyarrow, mapped into memory. `datasets` itself would bring pandas, dill and other
dependencies for three JSON files and Arrow's stream format.
"""

import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.config.data import DataConfig
from trainer.data.dataset import spread
from trainer.data.formats.files import unlisted
from trainer.data.formats.index import Index
from trainer.data.formats.labels import (
    LabelError,
    as_integer,
    escaped_text,
    label_of,
    labels_in,
    numbered,
    quoted,
)
from trainer.data.formats.records import LABEL, ROW, Records
from trainer.data.formats.signatures import what_it_is, what_lies_at
from trainer.data.formats.text import Text
from trainer.errors import BadInputError, first_line, reading
from trainer.host import strict_json

_TRAIN = "train"
_HELD = ("validation", "val", "valid", "test")
_CONTENTS = 32  # rows whose content is in the fingerprint
_END = 0  # ends a document: text holds no byte 0
_END_OF_STREAM = b"\xff" * 4 + bytes(4)
_BLOCK = 1 << 16
_ROWS = 4096  # that are read at once
_NAMED, _LONGEST_TYPE = 20, 200  # columns, and letters of a type, in a message


def splits(path: Path, held: str | None) -> tuple[Path, Path]:
    """Returns the folders of the training and the evaluation split.

    Args:
        path: data.path.
        held: data.eval_split; None: the first of the usual names that exists.

    Raises:
        BadInputError: If a split is missing.
    """
    if (path / "state.json").exists():
        raise BadInputError(
            f"{path}: holds one set without splits; save both, such as "
            "dataset.train_test_split(0.1).save_to_disk(DIR)"
        )
    file = path / "dataset_dict.json"
    names = _json(file).get("splits", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise BadInputError(f"{file}: 'splits' isn't a list of names; save the data again")
    chosen = held or next((name for name in _HELD if name in names), _HELD[0])
    for name in (_TRAIN, chosen):
        if name not in names:
            key = "" if name == _TRAIN else "; name what to measure on by data.eval_split"
            raise BadInputError(f"{path}: no split '{name}' (there are: {', '.join(names) or 'none'}){key}")
    return path / _TRAIN, path / chosen


class ArrowTable:
    """Rows of a split, mapped into memory by each process."""

    def __init__(self, folder: Path) -> None:
        """Reads the names of the columns.

        Raises:
            BadInputError: If pyarrow isn't installed, or a file can't be read.
        """
        self.folder = folder
        self._files = _files(folder)
        named = [file.name for file in self._files]
        self.left_out = unlisted(
            "Arrow file{s} that state.json doesn't name", folder, (".arrow",), named, deep=False
        )
        self._read = dict[str, Any]()
        self.columns: Sequence[str] = schema_of(self._files[0]).names

    def __getstate__(self) -> dict[str, Any]:
        """Drops the mapped columns: a loader worker maps its own."""
        return {**self.__dict__, "_read": {}}

    def column(self, name: str, key: str) -> Any:
        """Returns one column; others, which may be large, aren't read.

        Args:
            name: Name of the column.
            key: Configuration key that names it, for messages.

        Raises:
            BadInputError: If there is no such column, or a file can't be read.
        """
        if self.columns.count(name) != 1:
            times = "no column" if name not in self.columns else "more than one column"
            names = ", ".join(map(quoted, self.columns[:_NAMED])) + ", …" * (len(self.columns) > _NAMED)
            raise BadInputError(f"{self.folder}: {times} '{name}' (there are: {names}); name it by {key}")
        if name not in self._read:
            parts = [column_of(file, name) for file in self._files]
            if {part.type for part in parts} != {parts[0].type}:
                raise BadInputError(
                    f"{self.folder}: column '{name}' isn't of one type in its files; save the data again"
                )
            chunks = [chunk for part in parts for chunk in part.chunks]
            self._read[name] = import_pyarrow().chunked_array(chunks, parts[0].type)
        return self._read[name]

    def names_of(self, column: str) -> list[str] | None:
        """Returns the class names of a column, or None."""
        file = self.folder / "dataset_info.json"
        features = _json(file).get("features") or {}
        feature = features.get(column) if isinstance(features, dict) else None
        names = feature.get("names") if isinstance(feature, dict) else None
        if not isinstance(features, dict) or not isinstance(names, list | None):
            raise BadInputError(f"{file}: the features aren't what save_to_disk writes; save the data again")
        return None if names is None else [str(name) for name in names]


class ArrowImages(Records):
    """Images and labels of two columns."""

    def __init__(self, folder: Path, image: str, label: str) -> None:
        """Reads the labels.

        Raises:
            BadInputError: If a column is missing, or of another type.
        """
        self._table, self._image = ArrowTable(folder), image
        images = self._table.column(image, "data.input_column")
        self._in_struct = str(images.type).startswith("struct<") and images.type.get_field_index("bytes") >= 0
        encoded = images.type.field("bytes").type if self._in_struct else images.type
        if str(encoded) not in ("binary", "large_binary", "null" if self._in_struct else "binary"):
            raise BadInputError(
                f"{folder}: column '{image}' holds {_type(images)}, no encoded images; name another by "
                "data.input_column, or cast it to datasets.Image()"
            )
        labels, classes = _classes(
            folder, label, self._table.column(label, "data.label_column"), self._table.names_of(label)
        )
        rows = {LABEL: np.asarray(labels, np.int64), ROW: np.arange(len(labels))}
        super().__init__(Index(rows, classes, self._table.left_out))

    def file_name(self, sample: int) -> bytes:
        """See `Records.file_name`."""
        return f"{self._row(sample):08d}".encode()

    def contents(self) -> npt.NDArray[np.int64] | None:
        """See `Records.contents`: by paths, if all have a folder: a file's name isn't the file."""
        column = self._table.column(self._image, "data.input_column")
        if not self._in_struct or column.type.get_field_index("path") < 0:
            return None
        paths = import_pyarrow().compute.struct_field(column, "path").to_pylist()
        if not all(path and "/" in path for path in paths):
            return None
        keys: npt.NDArray[np.int64] = np.fromiter(map(hash, paths), np.int64, len(paths))[self._columns[ROW]]
        return keys

    def fingerprint(self) -> str:
        """Returns the sample count and a hash of all labels and the content of 32 rows."""
        digest = hashlib.sha256(repr(tuple(self.classes)).encode() + self.labels.tobytes())
        for sample in spread(len(self), _CONTENTS).tolist():
            digest.update(hashlib.sha256(self._bytes(sample) or b"").digest())
        return f"{len(self)} samples {digest.hexdigest()[:16]}"

    def absent(self) -> str:
        """Returns "": all files are open."""
        return ""

    def name(self, sample: int) -> str:
        """Returns folder and row."""
        return f"{self._table.folder} row {self._row(sample)}"

    def read(self, sample: int) -> bytearray:
        """See `Records.read`."""
        content = self._bytes(sample)
        if content is None:
            raise BadInputError(
                f"{self.name(sample)}: holds no bytes of an image, maybe only its path; save the data again "
                "where the files are"
            )
        return self._as_before(sample, bytearray(content))

    def _bytes(self, sample: int) -> bytes | None:
        value = self._table.column(self._image, "data.input_column")[self._row(sample)].as_py()
        content: bytes | None = value.get("bytes") if self._in_struct and value is not None else value
        return content


def _classes(folder: Path, name: str, column: Any, names: list[str] | None) -> tuple[list[int], list[str]]:
    """Returns labels as numbers, and the classes: those of the column's metadata, or those that occur.

    Raises:
        BadInputError: If there are no rows, or one has no valid label.
    """
    row = 0
    try:
        texts, given = list[str](), labels_in(column)
        for row, value in enumerate(given):
            if (
                value is None
                or value == ""
                or (names is not None and not 0 <= as_integer(value) < len(names))
            ):
                raise BadInputError(f"{folder}: row {row} has no label (column '{name}' is {value!r})")
            texts.append(sys.intern(label_of(value)))
        if not given:
            raise BadInputError(f"{folder}: holds no rows")
        if names is not None:
            return list(map(int, texts)), list(map(escaped_text, names))
        row = len(given)
        return numbered(texts)
    except LabelError as error:
        raise BadInputError(
            f"{folder}: row {row if row < len(column) else error.at} of column '{name}': {error}; mend it, "
            "or name another by data.label_column"
        ) from error


def arrow_text(path: Path, held: str | None, column: str) -> tuple[Text, Text]:
    """Returns a column of text as bytes, for training and evaluation: each row a document, ended by a byte 0.

    Raises:
        BadInputError: If the column is missing or isn't text.
    """
    learned, measured = (split_text(folder, column) for folder in splits(path, held))
    return learned, measured


def split_text(folder: Path, column: str) -> Text:
    """Returns one split of a folder; see `arrow_text`."""
    table = ArrowTable(folder)
    rows = table.column(column, "data.input_column")
    if str(rows.type) not in ("string", "large_string"):
        raise BadInputError(
            f"{table.folder}: column '{column}' holds {_type(rows)}, no text; name another by "
            "data.input_column"
        )
    text, number = bytearray(), 0
    for chunk in rows.chunks:
        for start in range(0, len(chunk), _ROWS):
            for row in chunk.slice(start, _ROWS).to_pylist():
                document = (row or "").encode()
                if b"\0" in document:
                    raise BadInputError(f"{table.folder}: row {number} holds a byte 0, which ends a document")
                if document:
                    text += document + b"\0"
                number += 1
    if not text:
        raise BadInputError(f"{table.folder}: column '{column}' holds no text")
    return Text(np.frombuffer(text, np.uint8), 256, _END, "bytes")


def _type(column: Any) -> str:
    """Returns the type of a column, cut to a printable length."""
    text = str(column.type)
    return text if len(text) <= _LONGEST_TYPE else f"{text[:_LONGEST_TYPE]}…"


def _files(folder: Path) -> list[Path]:
    """Returns the files of a split, as state.json names them.

    Raises:
        BadInputError: If state.json is invalid, names no files, or selects rows by an index table.
    """
    state = folder / "state.json"
    content = _json(state)
    try:
        names = [str(one["filename"]) for one in content.get("_data_files") or []]
    except (KeyError, TypeError, AttributeError) as error:
        raise BadInputError(f"{state}: isn't what save_to_disk writes; save the data again") from error
    if not names:
        raise BadInputError(f"{state}: names no files; save the data again")
    if content.get("_indices_data_files") or content.get("_indices_files"):
        raise BadInputError(f"{state}: chooses rows by a table of their numbers; save the data again")
    if odd := next((name for name in names if "/" in name or "\0" in name or escaped_text(name) != name), ""):
        raise BadInputError(f"{state}: {quoted(odd)} isn't the name of a file beside it; save the data again")
    return [folder / name for name in names]


def _json(file: Path) -> Mapping[str, Any]:
    remedy = "data.path is a folder that DatasetDict.save_to_disk wrote"
    with reading(file, remedy):
        data = file.read_bytes()
    try:
        values = strict_json.parse_quickly(data)
    except ValueError as error:
        what = what_it_is(data[:_BLOCK])
        raise BadInputError(
            f"{file}: isn't JSON ({what or first_line(error)}); save the data again"
        ) from error
    if not isinstance(values, Mapping):
        raise BadInputError(f"{file}: isn't what save_to_disk writes; save the data again")
    return values


def images_split(config: DataConfig, path: Path, split: str) -> ArrowImages:
    """Opens the images of the training split ("train") or the evaluation split (data.eval_split)."""
    learned, held = splits(path, config.eval_split)
    folder = learned if split == _TRAIN else held
    return ArrowImages(folder, config.input_column or "image", config.label_column)


def schema_of(file: Path) -> Any:
    """Returns a file's schema.

    Raises:
        BadInputError: If it can't be read.
    """
    return _opened(file)[1].schema


def column_of(file: Path, name: str) -> Any:
    """Reads one column of a file; others, which may be large, aren't read.

    Raises:
        BadInputError: If the file can't be read, is truncated or invalid.
    """
    pyarrow = import_pyarrow()
    schema = schema_of(file)
    index = schema.get_field_index(name)
    if index < 0:
        raise BadInputError(f"{file}: no column {quoted(name)}, which other files have; save the data again")
    try:
        source, stream = _opened(file, [index])
        table = stream.read_all()
        # Including each offset: pyarrow reads memory at unchecked offsets.
        table.validate(full=True)
    except (OSError, OverflowError, MemoryError, pyarrow.ArrowException) as error:
        raise _unreadable(file, error) from error
    _check_end(file, source)
    return table.column(name)


def import_pyarrow(what: object = "data.name=hf") -> Any:
    """Imports pyarrow with its reader of Parquet.

    Raises:
        BadInputError: If it isn't installed; names what needs it.
    """
    try:
        import pyarrow.compute
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise BadInputError(
            f"{what}: needs pyarrow, which isn't installed: pip install pyarrow (the images for development "
            "have it)"
        ) from error
    return pyarrow


def _opened(file: Path, columns: list[int] | None = None) -> tuple[Any, Any]:
    """Maps a file into memory and opens its stream.

    Raises:
        BadInputError: If it can't be read.
    """
    pyarrow = import_pyarrow()
    try:
        source = pyarrow.memory_map(str(file))
        # Without threads, which a fork doesn't copy.
        options = pyarrow.ipc.IpcReadOptions(use_threads=False, included_fields=columns)
        return source, pyarrow.ipc.open_stream(source, options=options)
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(file, error) from error


def _check_end(file: Path, source: Any) -> None:
    """Checks that the end-of-stream marker follows the last batch: pyarrow accepts a file without it.

    Raises:
        BadInputError: If the marker is missing, or other bytes follow it.
    """
    end = source.tell()
    source.seek(max(0, end - len(_END_OF_STREAM)))
    if source.read(len(_END_OF_STREAM)) != _END_OF_STREAM:
        raise BadInputError(f"{file}: is cut off at byte {end:,}, after a whole batch; save the data again")
    if any(piece.strip(b"\0") for piece in iter(lambda: source.read(_BLOCK), b"")):
        raise BadInputError(f"{file}: more lies behind its end at byte {end:,}; save the data again")


def _unreadable(file: Path, error: Exception) -> BadInputError:
    what = "" if isinstance(error, OSError) else what_lies_at(file)
    return BadInputError(f"{file}: can't be read ({what or first_line(error)}); save the data again")
