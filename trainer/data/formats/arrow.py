"""Folders that Hugging Face's `datasets` writes by `save_to_disk`: a folder of Arrow files for each split.

Read by pyarrow alone, mapped into memory: `datasets` would bring pandas, dill and others for what three JSON
files and Arrow's stream format say.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.data import DataConfig
from trainer.data.dataset import spread
from trainer.data.formats.files import numbered, printable
from trainer.data.formats.records import Records
from trainer.data.formats.text import Text, joined
from trainer.data.shared import Columns
from trainer.errors import BadInputError
from trainer.host import strict_json

TRAIN = "train"
_HELD = ("validation", "val", "valid", "test")
_CONTENTS = 32  # rows of which the fingerprint holds the content
_END = 0  # of a document: text of people has no such byte


def splits(path: Path, held: str | None) -> tuple[Path, Path]:
    """The folders to learn from and to measure on.

    Args:
        path: What data.path says.
        held: What data.eval_split says.

    Raises:
        BadInputError: If they aren't there.
    """
    if (path / "state.json").exists():
        raise BadInputError(
            f"{path}: holds one set without splits; save both, such as "
            "dataset.train_test_split(0.1).save_to_disk(DIR)"
        )
    there = _json(path / "dataset_dict.json").get("splits", [])
    chosen = held or next((name for name in _HELD if name in there), _HELD[0])
    for name in (TRAIN, chosen):
        if name not in there:
            key = "" if name == TRAIN else "; name what to measure on by data.eval_split"
            raise BadInputError(f"{path}: no split '{name}' (there are: {', '.join(there) or 'none'}){key}")
    return path / TRAIN, path / chosen


class ArrowTable:
    """The rows of a split, mapped into memory by each process for itself."""

    def __init__(self, folder: Path) -> None:
        """Opens all of its files.

        Raises:
            BadInputError: If pyarrow isn't installed, or a file can't be read.
        """
        self.folder = folder
        files = _json(folder / "state.json").get("_data_files", [])
        self._files = [folder / one["filename"] for one in files]
        self._table: Any = None
        if not self._files:
            raise BadInputError(f"{folder / 'state.json'}: names no files; save the data again")
        self.columns: Sequence[str] = self._open().column_names

    def _open(self) -> Any:
        if self._table is None:
            try:
                import pyarrow
            except ModuleNotFoundError as error:
                raise BadInputError(
                    "data.name=hf needs pyarrow, which isn't installed: pip install pyarrow (the images for "
                    "development have it)"
                ) from error
            parts = []
            for file in self._files:
                try:
                    source = pyarrow.memory_map(str(file))
                    # Without threads of its own, which a fork would leave behind.
                    options = pyarrow.ipc.IpcReadOptions(use_threads=False)
                    parts.append(pyarrow.ipc.open_stream(source, options=options).read_all())
                except (OSError, pyarrow.ArrowException) as error:
                    what = str(error).splitlines()[0]
                    raise BadInputError(f"{file}: can't be read ({what}); save the data again") from error
            self._table = pyarrow.concat_tables(parts)
        return self._table

    def __getstate__(self) -> dict[str, Any]:
        """Called when a worker is started without fork."""
        return {**self.__dict__, "_table": None}

    def __len__(self) -> int:
        """Number of rows."""
        return int(self._open().num_rows)

    def column(self, name: str, key: str) -> Any:
        """A column.

        Raises:
            BadInputError: If there is none of that name.
        """
        if name not in self.columns:
            raise BadInputError(
                f"{self.folder}: no column '{name}' (there are: {', '.join(self.columns)}); name it by {key}"
            )
        return self._open().column(name)

    def names_of(self, column: str) -> list[str] | None:
        """The names of a column's classes, if it has any."""
        features = _json(self.folder / "dataset_info.json").get("features") or {}
        feature = features.get(column)
        names = feature.get("names") if isinstance(feature, dict) else None
        return None if names is None else [str(name) for name in names]


class ArrowImages(Records):
    """Encoded images and their labels, of two columns."""

    def __init__(self, folder: Path, image: str, label: str) -> None:
        """Reads the labels.

        Raises:
            BadInputError: If a column isn't there, or holds something else.
        """
        self._table, self._image = ArrowTable(folder), image
        images = self._table.column(image, "data.input_column")
        self._in_struct = str(images.type).startswith("struct<") and "bytes" in str(images.type)
        if not self._in_struct and str(images.type) not in ("binary", "large_binary"):
            raise BadInputError(
                f"{folder}: column '{image}' holds {images.type}, no encoded images; name another by "
                "data.input_column, or cast it to datasets.Image()"
            )
        given = self._table.column(label, "data.label_column").to_pylist()
        if not given:
            raise BadInputError(f"{folder}: holds no rows")
        names = self._table.names_of(label)
        for row, value in enumerate(given):
            if value is None or value == "" or (names is not None and not 0 <= value < len(names)):
                raise BadInputError(f"{folder}: row {row} has no label (column '{label}' is {value!r})")
            if not isinstance(value, int | str):
                raise BadInputError(
                    f"{folder}: column '{label}' holds {type(value).__name__}, no class; name another by "
                    "data.label_column"
                )
        self.classes: Sequence[str]
        if names is None:
            labels, classes = numbered([printable(str(value)) for value in given])
            self.classes = tuple(classes)
        else:
            labels, self.classes = given, tuple(map(printable, names))
        self._columns = Columns.hold({"label": np.asarray(labels, dtype=np.int64)})

    def file_name(self, sample: int) -> bytes:
        """See `Records.file_name`."""
        return f"{sample:08d}".encode()

    def fingerprint(self) -> str:
        """Of all labels, and the content of some rows."""
        digest = hashlib.sha256(repr(tuple(self.classes)).encode() + self.labels.tobytes())
        for sample in spread(len(self), _CONTENTS).tolist():
            digest.update(hashlib.sha256(self._bytes(sample) or b"").digest())
        return f"{len(self)} samples {digest.hexdigest()[:16]}"

    def absent(self) -> str:
        """Nothing: all files are open."""
        return ""

    def name(self, sample: int) -> str:
        """Row and folder."""
        return f"{self._table.folder} row {sample}"

    def read(self, sample: int) -> bytearray:
        """See `Records.read`."""
        found = self._bytes(sample)
        if found is None:
            raise BadInputError(
                f"{self.name(sample)}: holds no bytes of an image, maybe only its path; save the data again "
                "where the files are"
            )
        return bytearray(found)

    def _bytes(self, sample: int) -> bytes | None:
        value = self._table.column(self._image, "data.input_column")[sample].as_py()
        found: bytes | None = value.get("bytes") if self._in_struct and value is not None else value
        return found


def arrow_text(path: Path, held: str | None, column: str) -> tuple[Text, Text]:
    """A column of text as bytes, each row a document with a byte 0 after it: to learn from, to measure on.

    Raises:
        BadInputError: If it isn't there, or isn't text.
    """
    learned, measured = (split_text(folder, column) for folder in splits(path, held))
    return learned, measured


def split_text(folder: Path, column: str) -> Text:
    """One split of it; see `arrow_text`."""
    table = ArrowTable(folder)
    rows = table.column(column, "data.input_column")
    if str(rows.type) not in ("string", "large_string"):
        raise BadInputError(
            f"{table.folder}: column '{column}' holds {rows.type}, no text; name another by data.input_column"
        )
    documents = []
    for number, row in enumerate(rows.to_pylist()):
        document = np.frombuffer((row or "").encode(), np.uint8)
        if (document == _END).any():
            raise BadInputError(f"{table.folder}: row {number} holds a byte 0, which ends a document")
        if len(document):
            documents.append(document)
    if not documents:
        raise BadInputError(f"{table.folder}: column '{column}' holds no text")
    return Text(joined(documents, _END), 256, _END, "bytes")


def _json(file: Path) -> Mapping[str, Any]:
    try:
        values = strict_json.parse_quickly(file.read_bytes())
    except OSError as error:
        raise BadInputError(
            f"{file}: can't be read ({error.strerror}); data.path is a folder that "
            "DatasetDict.save_to_disk wrote"
        ) from error
    except ValueError as error:
        raise BadInputError(f"{file}: isn't JSON; save the data again") from error
    if not isinstance(values, Mapping):
        raise BadInputError(f"{file}: isn't what save_to_disk writes; save the data again")
    return values


def images_split(config: DataConfig, path: Path, split: str) -> ArrowImages:
    """Opens the images to learn from ("train"), or those to measure on (data.eval_split)."""
    learned, held = splits(path, config.eval_split)
    folder = learned if split == TRAIN else held
    return ArrowImages(folder, config.input_column or "image", config.label_column)
