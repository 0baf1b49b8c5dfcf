"""Files of rows of text, of prompt and completion, or of messages: JSON lines, Parquet, Arrow folders."""

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from trainer.data.formats.arrow import ArrowTable, import_pyarrow, splits
from trainer.data.formats.messages import KWARGS, RowError
from trainer.data.formats.signatures import what_it_is
from trainer.data.left_out import held_out
from trainer.errors import BadInputError, first_line, reading
from trainer.host import strict_json
from trainer.host.files import hash_inside, lines_inside

_TRAIN = "train"
# Keys of a row; others are counted.
READ = (
    *("text", "prompt", "completion", "messages", "conversations", "tools"),
    *("instruction", "input", "output", KWARGS),
)
_HELD = ("validation", "val", "valid", "test", "eval")
_LINES = (".jsonl", ".json", ".ndjson")
_NUMBERED = re.compile(r"(.+)-\d{5}-of-(\d{5})", re.ASCII)
_TENTH = 10
_ROWS = 64  # of Parquet that are read at once
_Row = tuple[str, Mapping[str, Any] | RowError]  # where it stands, and its keys


class RowSplit(NamedTuple):
    """Rows to learn from or to measure on.

    Attributes:
        files: They are read one after another; folders are splits by `save_to_disk`.
        tenth: None for all rows; True for each tenth of them (of fewer, for the last), False for the others.
        column: The one that is read; None: whichever is there.
        beside: Names in the same folder that aren't read.
    """

    files: tuple[Path, ...]
    tenth: bool | None = None
    column: str | None = None
    beside: tuple[str, ...] = ()

    def sha256(self) -> str:
        """Hash of the content of all files, and of what is read of them."""
        digest = hashlib.sha256(repr((self.tenth, self.column, self.beside)).encode())
        for path in self.files:
            inside = [*sorted(path.glob("*.arrow")), path / "state.json"] if path.is_dir() else [path]
            for file in inside:
                with reading(file):
                    digest.update(hash_inside(file.resolve()).encode())
        return digest.hexdigest()

    def rows(self) -> Iterator[_Row]:
        """Yields each row after its place: file and line or number; the error where it isn't JSON.

        Raises:
            BadInputError: If a file can't be read.
        """
        every = (one for path in self.files for one in _rows(path, (*READ, self.column)))
        if self.tenth is None:
            yield from every
            return
        number, before = 0, None
        for one in every:
            if before is not None and self.tenth == (number % _TENTH == 0):
                yield before
            number, before = number + 1, one
        if before is not None and self.tenth == (number % _TENTH == 0 or number < _TENTH):
            yield before


def splits_of(path: Path, held: str | None, column: str | None = None) -> tuple[RowSplit, RowSplit]:
    """Finds the rows to learn from and to measure on: by splits in the folder, else by tenths.

    Args:
        path: A file; or a folder with train.jsonl, train.parquet or train/, and one to measure on beside
            it; or with files of one set; or what `save_to_disk` wrote.
        held: What data.eval_split says.
        column: What data.input_column says.

    Raises:
        BadInputError: If there is nothing that can be read.
    """
    if (path / "dataset_dict.json").exists():
        learned, measured = splits(path, held)
        return RowSplit((learned,), None, column), RowSplit((measured,), None, column)
    # As ultrachat_200k has them: train_sft-00000-of-00003.parquet, beside those of test_sft and of train_gen.
    pairs = {f"{name}{end}": f"{_TRAIN}{end}" for end in _endings(path) for name in _HELD}
    train = _files(path, pairs.get(held or "", _TRAIN)) if path.is_dir() else ()
    if not train and held is None and (splits_there := [name for name in pairs if _files(path, name)]):
        raise BadInputError(
            f"{path}: holds several sets; choose one by data.eval_split={' or '.join(splits_there)}"
        )
    if train:
        names = [held] if held else _HELD
        found = next((files for name in names if (files := _files(path, name))), None)
        if found is None:
            raise BadInputError(
                f"{path}: has {train[0].name}, and nothing to measure on: {' or '.join(names)}.jsonl, "
                ".parquet or a folder; put one there, or name the training file alone, of which each tenth "
                "row is held back"
            )
        return RowSplit(train, None, column, _beside(path, [*train, *found])), RowSplit(found, None, column)
    if held is not None:
        raise BadInputError(f"{path}: holds one set without splits; leave data.eval_split={held} out")
    files = (path,) if (path / "state.json").exists() or not path.is_dir() else _inside(path)
    if not files:
        raise BadInputError(f"{path}: holds no .jsonl or .parquet files; give a file, or the folder of some")
    if name := held_out(one.name for one in files):
        raise BadInputError(
            f"{path}: {name} would be learned from as one set with the other files; call them "
            "train.jsonl and validation.jsonl, or if all are of one set, call it otherwise"
        )
    beside = _beside(path, files) if path.is_dir() and files != (path,) else ()
    return RowSplit(files, False, column, beside), RowSplit(files, True, column)


def _endings(folder: Path) -> list[str]:
    """Returns what follows "train" in the names of splits, such as "_sft"."""
    names = (one.stem for place in (folder, folder / "data") for one in _inside(place))
    splits = {_NUMBERED.sub(r"\1", name) for name in names if name.startswith(_TRAIN)}
    return sorted(name.removeprefix(_TRAIN) for name in splits)


def _files(folder: Path, split: str) -> tuple[Path, ...]:
    """The files of a split, as people and the hub name them: val.jsonl, val/…, val-00000-of-00002.parquet."""
    if (folder / split).is_dir():
        return _inside(folder / split) or _files(folder / split, split)
    places = (folder, folder / "data")
    found = [[one for one in _inside(place) if _is_of(one, split)] for place in places]
    return tuple(found[0] or found[1])


def _beside(folder: Path, read: Sequence[Path]) -> tuple[str, ...]:
    """Names of what lies beside the files that are read, but for hidden files and splits to measure on."""
    places = {folder, *(one.parent for one in read)}
    others = {one for place in places for one in place.iterdir()} - {*read, *places}
    held = (one for one in others if any(_is_of(one, name) for name in _HELD))
    return tuple(sorted(one.name for one in others - {*held} if not one.name.startswith(".")))


def _is_of(file: Path, split: str) -> bool:
    return file.stem == split or file.stem.startswith(f"{split}-")


def _inside(folder: Path) -> tuple[Path, ...]:
    if not folder.is_dir():
        return ()
    shown = (one for one in folder.iterdir() if not one.name.startswith("."))
    files = sorted(one for one in shown if one.suffix in (*_LINES, ".parquet") and one.is_file())
    for one, other in pairwise(files):
        if one.stem == other.stem:
            raise BadInputError(
                f"{folder}: {one.name} and {other.name} may hold the same rows; keep one of them"
            )
    numbered = Counter((found[1], int(found[2])) for one in files if (found := _NUMBERED.fullmatch(one.stem)))
    for (name, count), there in numbered.items():
        if there != count:
            raise BadInputError(
                f"{folder}: holds {there} of the {count} files {name}-…-of-{count:05}; fetch the others"
            )
    return tuple(files)


def _rows(path: Path, read: Collection[str | None]) -> Iterator[_Row]:
    if path.is_dir():
        yield from _arrow(path, read)
    elif path.suffix == ".parquet":
        yield from _parquet(path, read)
    else:
        yield from _lines(path)


def _lines(file: Path) -> Iterator[_Row]:
    with reading(file, "give JSON lines"):
        for number, line in enumerate(lines_inside(file.resolve()), 1):
            where = f"{file}: line {number}"
            text = line.removeprefix(b"\xef\xbb\xbf").strip()
            if not text:
                yield where, {}
                continue
            if number == 1 and (what := _no_lines(text)):
                raise BadInputError(f"{file}: {what}")
            try:
                row = strict_json.parse(text)
            except ValueError as error:
                reason = str(error).replace("line 1, ", "")
                yield where, RowError(f"{reason}; each line is a JSON object of its own")
                continue
            if isinstance(row, dict):
                yield where, {name: value for name, value in row.items() if value is not None}
            else:
                yield where, RowError('isn\'t a JSON object, such as {"messages": …}')


def _no_lines(first: bytes) -> str:
    if first.startswith(b"["):
        return "is one JSON list; write a line for each of its objects (jq -c '.[]' FILE > FILE.jsonl)"
    what = what_it_is(first)
    return "" if not what or what.startswith("text") or first.startswith(b"{") else f"is {what}"


def _parquet(file: Path, read: Collection[str | None]) -> Iterator[_Row]:
    pyarrow, number = import_pyarrow(file), 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            unread = {name: ... for name in table.schema_arrow.names if name not in read}
            columns = [name for name in table.schema_arrow.names if name in read]
            for batch in table.iter_batches(_ROWS, columns=columns, use_threads=False):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file}: row {number}", {**_dense(row), **unread}
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError, OverflowError) as error:
        raise BadInputError(f"{file}: not a readable Parquet file ({first_line(error)})") from error


def _arrow(folder: Path, read: Collection[str | None]) -> Iterator[_Row]:
    table = ArrowTable(folder)
    unread = {name: ... for name in table.columns if name not in read}
    names = [name for name in table.columns if name in read]
    columns = [table.column(name, "data.input_column") for name in names]
    for number in range(len(columns[0]) if columns else 0):
        row = {name: column[number].as_py() for name, column in zip(names, columns, strict=True)}
        yield f"{folder}: row {number + 1}", {**_dense(row), **unread}


def _dense(value: Any) -> Any:
    """A row of columns without the keys that it lacks: structs of Arrow have all keys, some with no value."""
    if isinstance(value, dict):
        return {key: _dense(one) for key, one in value.items() if one is not None}
    return [_dense(one) for one in value] if isinstance(value, list) else value
