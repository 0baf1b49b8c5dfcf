"""Rows of text, of prompt and completion, or of messages: JSON lines, Parquet, and Arrow folders."""

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainer.data.formats.arrow import ArrowTable, splits
from trainer.data.formats.signatures import what_it_is
from trainer.errors import BadInputError, first_line
from trainer.host import strict_json
from trainer.host.files import hash_inside, lines_inside

TRAIN = "train"
READ = (
    "text",
    "prompt",
    "completion",
    "messages",
    "conversations",
    "tools",
)  # keys of a row; others are counted
_HELD = ("validation", "val", "valid", "test", "eval")
_LINES = (".jsonl", ".json", ".ndjson")
_TENTH = 10
_ROWS = 64  # of Parquet that are read at once
_MOST_BYTES = 4 << 30  # that a group of such rows may inflate to
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
THOUGHT = ("reasoning_content", "thinking", "reasoning")  # names of what a model thought, in a message
_TOLD = 6  # names, in a message
# Half of a pair, which is no text; and what Unicode reserves, which marks places here.
_NO_TEXT = re.compile("[\ud800-\udfff\ufdd0-\ufdef]")

_Row = tuple[str, Mapping[str, Any]]  # where it stands, and its keys


class RowError(ValueError):
    """What is wrong with a row; who knows its number adds that."""


class SkippedError(Exception):
    """A row that is left out, and why."""


class Talk(NamedTuple):
    """A conversation.

    Attributes:
        messages: Each with role, and content as text.
        counting: The messages that count in the loss, by number.
        tools: What the assistant may call.
    """

    messages: Sequence[Mapping[str, Any]]
    counting: Sequence[int]
    tools: Any = None


class Plain(NamedTuple):
    """A text, or a prompt and how it goes on: only what follows the prompt counts."""

    prompt: str
    completion: str


class Split(NamedTuple):
    """Rows to learn from or to measure on.

    Attributes:
        files: They are read one after another; folders are splits by `save_to_disk`.
        tenth: None for all rows; True for each tenth of them (of fewer, for the last), False for the others.
        column: The one that is read; None: whichever is there.
    """

    files: tuple[Path, ...]
    tenth: bool | None = None
    column: str | None = None

    def sha256(self) -> str:
        """Hash of the content of all files, and of what is read of them."""
        digest = hashlib.sha256(repr((self.tenth, self.column)).encode())
        for path in self.files:
            inside = [*sorted(path.glob("*.arrow")), path / "state.json"] if path.is_dir() else [path]
            for file in inside:
                try:
                    digest.update(hash_inside(file.resolve()).encode())
                except OSError as error:
                    raise BadInputError(f"{file}: can't be read ({error.strerror})") from error
        return digest.hexdigest()

    def rows(self) -> Iterator[_Row]:
        """Where each row stands, and the row.

        Raises:
            BadInputError: If one isn't JSON, or a file can't be read.
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


def splits_of(path: Path, held: str | None, column: str | None = None) -> tuple[Split, Split]:
    """The rows to learn from and to measure on: by splits that are there, else each tenth is measured on.

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
        return Split((learned,), None, column), Split((measured,), None, column)
    train = _files(path, TRAIN) if path.is_dir() else ()
    if train:
        names = [held] if held else _HELD
        found = next((files for name in names if (files := _files(path, name))), None)
        if found is None:
            raise BadInputError(
                f"{path}: has {train[0].name}, and nothing to measure on: {' or '.join(names)}.jsonl, "
                ".parquet or a folder; put one there, or name the training file alone, of which each tenth "
                "row is held back"
            )
        return Split(train, None, column), Split(found, None, column)
    if held is not None:
        raise BadInputError(f"{path}: holds one set without splits; leave data.eval_split={held} out")
    files = (path,) if (path / "state.json").exists() or not path.is_dir() else _inside(path)
    if not files:
        raise BadInputError(f"{path}: holds no .jsonl or .parquet files; give a file, or the folder of some")
    return Split(files, False, column), Split(files, True, column)


def _files(folder: Path, split: str) -> tuple[Path, ...]:
    """The files of a split, as people and the hub name them: val.jsonl, val/…, val-00000-of-00002.parquet."""
    if (folder / split).is_dir():
        return _inside(folder / split) or _files(folder / split, split)
    places = (folder, folder / "data")
    found = [[one for one in _inside(place) if _is_of(one, split)] for place in places]
    return tuple(found[0] or found[1])


def _is_of(file: Path, split: str) -> bool:
    return file.stem == split or file.stem.startswith(f"{split}-")


def _inside(folder: Path) -> tuple[Path, ...]:
    if not folder.is_dir():
        return ()
    shown = (one for one in folder.iterdir() if not one.name.startswith("."))
    return tuple(sorted(one for one in shown if one.suffix in (*_LINES, ".parquet") and one.is_file()))


def _rows(path: Path, read: Collection[str | None]) -> Iterator[_Row]:
    if path.is_dir():
        yield from _arrow(path, read)
    elif path.suffix == ".parquet":
        yield from _parquet(path, read)
    else:
        yield from _lines(path)


def _lines(file: Path) -> Iterator[_Row]:
    try:
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
                raise BadInputError(f"{where}: {reason}; each line is a JSON object of its own") from error
            if not isinstance(row, dict):
                raise BadInputError(f'{where}: isn\'t a JSON object, such as {{"messages": …}}')
            yield where, row
    except OSError as error:
        raise BadInputError(f"{file}: can't be read ({error.strerror}); give JSON lines") from error


def _no_lines(first: bytes) -> str:
    if first.startswith(b"["):
        return "is one JSON list; write a line for each of its objects (jq -c '.[]' FILE > FILE.jsonl)"
    what = what_it_is(first)
    return "" if not what or what.startswith("text") or first.startswith(b"{") else f"is {what}"


def _parquet(file: Path, read: Collection[str | None]) -> Iterator[_Row]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise BadInputError(
            f"{file}: Parquet needs pyarrow: pip install pyarrow; or use JSON lines"
        ) from error
    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            facts = table.metadata
            groups = [facts.row_group(group) for group in range(facts.num_row_groups)]
            if max((group.total_byte_size for group in groups), default=0) > _MOST_BYTES:
                raise BadInputError(
                    f"{file}: a group of its rows takes more than {_MOST_BYTES >> 30} GiB; write smaller ones"
                )
            unread = {name: ... for name in table.schema_arrow.names if name not in read}
            columns = [name for name in table.schema_arrow.names if name in read]
            for batch in table.iter_batches(_ROWS, columns=columns, use_threads=False):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file}: row {number}", {**_there(row), **unread}
            if number != facts.num_rows:
                raise BadInputError(
                    f"{file}: holds {number:,} rows, and says {facts.num_rows:,}; write it again"
                )
    except MemoryError as error:
        raise BadInputError(f"{file}: row {number + 1}: doesn't fit into the memory") from error
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError, OverflowError) as error:
        raise BadInputError(f"{file}: not a readable Parquet file ({first_line(error)})") from error


def _arrow(folder: Path, read: Collection[str | None]) -> Iterator[_Row]:
    table = ArrowTable(folder)
    unread = {name: ... for name in table.columns if name not in read}
    names = [name for name in table.columns if name in read]
    columns = [table.column(name, "data.input_column") for name in names]
    for number in range(len(columns[0]) if columns else 0):
        row = {name: column[number].as_py() for name, column in zip(names, columns, strict=True)}
        yield f"{folder}: row {number + 1}", {**_there(row), **unread}


def _there(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of columns without what it doesn't have; structs of Arrow have all keys, some with no value."""
    return {name: _dense(value) for name, value in row.items() if value is not None}


def _dense(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _dense(one) for key, one in value.items() if one is not None}
    return [_dense(one) for one in value] if isinstance(value, list) else value


def sample_of(row: Mapping[str, Any], learn: str, column: str | None = None) -> Talk | Plain:
    """What a row says.

    Args:
        row: Its keys and values.
        learn: As language.learn.
        column: The key that is read; None: whichever is there.

    Raises:
        RowError: If it can't be meant.
        SkippedError: If there is nothing to learn from in it.
    """
    if not row:
        raise SkippedError("empty row{s}")
    if _NO_TEXT.search(json.dumps(row, ensure_ascii=False, default=lambda _: "")):
        raise RowError(
            "holds half of a surrogate pair, or a character that Unicode reserves (U+FDD0 to U+FDEF)"
        )
    kind = _kind(row, column)
    if kind == "messages":
        return _talk(_messages(row[column or kind], kind), 0, row.get("tools"), learn)
    if kind == "conversations":
        return _talk(_messages(row[kind], kind), 0, row.get("tools"), learn)
    if kind == "text":
        text = _string(row[column or kind], kind)
        if not text.strip():
            raise SkippedError("row{s} of empty text")
        return Plain("", text)
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) or isinstance(completion, list):
        before, after = _messages(prompt, "prompt"), _messages(completion, "completion")
        return _talk([*before, *after], len(before), row.get("tools"), learn)
    prompt, completion = _string(prompt, "prompt"), _string(completion, "completion")
    if not completion.strip():
        raise SkippedError("row{s} with an empty completion")
    return Plain("", prompt + completion) if learn == "all" else Plain(prompt, completion)


def unread_names(row: Mapping[str, Any], column: str | None) -> list[str]:
    """Names in a row that `sample_of` reads nothing of."""
    kind = _kind(row, column)
    read = ("prompt", "completion") if kind == "prompt" else (kind if column is None else column,)
    tools = kind in ("messages", "conversations") or any(isinstance(row.get(one), list) for one in read)
    return [name for name in row if name not in (*read, *("tools",) * tools)]


def _kind(row: Mapping[str, Any], column: str | None) -> str:
    if column not in (None, "prompt", "completion"):
        if column not in row:
            raise RowError(f"has {_names(row)}, and no {column!r}, which data.input_column names")
        return "messages" if isinstance(row[column], list) else "text"
    kinds = [kind for kind in ("text", "messages", "conversations") if kind in row and not column]
    kinds += ["prompt"] * ("completion" in row and "prompt" in row)
    if len(kinds) != 1:
        what = f"has {' and '.join(kinds)}: name one by data.input_column" if kinds else f"has {_names(row)}"
        raise RowError(f"{what}; a row has text, or prompt and completion, or messages")
    return kinds[0]


def _talk(messages: Sequence[Mapping[str, Any]], first: int, tools: Any, learn: str) -> Talk:
    said = [number for number, one in enumerate(messages) if one["role"] == "assistant"]
    if any(
        not str(messages[n].get("content") or "").strip() and not messages[n].get("tool_calls") for n in said
    ):
        raise SkippedError("conversation{s} with an empty assistant turn")
    counting = [number for number in said if number >= first and messages[number].get("weight", 1)]
    if not counting:
        raise SkippedError("conversation{s} without an assistant turn to learn from")
    tools = _objects(tools, "tools") if tools else None
    return Talk(messages, counting[-1:] if learn == "last" else counting, tools)


def _messages(value: Any, key: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise RowError(f"{key} is {_shown(value)}, and should be a list of messages with role and content")
    if not value:
        raise SkippedError("conversation{s} without messages")
    return [_message(one, f"{key}[{number}]") for number, one in enumerate(value)]


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RowError(f"{where} is {_shown(value)}, and should have role and content")
    if "from" in value and "role" not in value:
        role = _ROLES.get(str(value["from"]))
        if role is None or set(value) - {"from", "value", "weight"}:
            raise RowError(
                f"{where} has {_names(value)}, from {_shown(value['from'])}: human, gpt and system are read; "
                "give others as role and content"
            )
        value = {"role": role, "content": value.get("value"), **_weight_of(value)}
    role, content = value.get("role"), value.get("content")
    if not isinstance(role, str) or not role:
        raise RowError(f"{where}: role is {_shown(role)}, and should be user, assistant or system")
    if value.get("weight", 1) not in (0, 1):
        raise RowError(f"{where}: weight is {_shown(value['weight'])}, and should be 0 or 1")
    if calls := value.get("tool_calls"):
        calls = [_call(one, f"{where}: tool_calls") for one in _objects(calls, f"{where}: tool_calls")]
        value = {**value, "tool_calls": calls}
    if content is None and not calls:
        raise RowError(f"{where}: has no content")
    if isinstance(content, list):
        content = "".join(_part(one, where) for one in content)
    # As transformers gives templates what a model thought, by whichever of its names they read.
    thought = next((value[name] for name in THOUGHT if value.get(name) is not None), None)
    named = (
        {} if thought is None else {"thinking": value.get("thinking", thought), "reasoning_content": thought}
    )
    text = "" if content is None else _string(content, f"{where}: content")
    return {**value, **named, "content": text}


def _objects(value: Any, where: str) -> list[dict[str, Any]]:
    """A list of objects; files of columns hold the list, or each object, as JSON in a string."""
    found = _parsed(value, where)
    if not isinstance(found, list):
        raise RowError(f"{where} is {_shown(found)}, and should be a list of objects")
    found = [_parsed(one, where) for one in found]
    if odd := [one for one in found if not isinstance(one, dict)]:
        raise RowError(f"{where} holds {_shown(odd[0])}, and should hold objects")
    return found


def _call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """A call of a tool with its arguments as an object: a string would be quoted again by a template."""
    if isinstance(inner := call.get("function"), dict):
        return {**call, "function": _call(inner, where)}
    if "arguments" not in call:
        return call
    arguments = _parsed(call["arguments"] or {}, f"{where}: arguments")
    if not isinstance(arguments, dict):
        raise RowError(f"{where}: arguments is {_shown(arguments)}, and should be an object")
    return {**call, "arguments": arguments}


def _parsed(value: Any, where: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return strict_json.parse(value.encode())
    except ValueError as error:
        raise RowError(f"{where} is {_shown(value)}: {error}") from error


def _weight_of(value: Mapping[str, Any]) -> dict[str, Any]:
    return {"weight": value["weight"]} if "weight" in value else {}


def _part(part: Any, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and set(part) == {"type", "text"}:
        return _string(part["text"], f"{where}: text")
    kind = part.get("type") if isinstance(part, dict) else part
    raise RowError(f"{where}: content holds {_shown(kind)}, and only parts of type text are read")


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{where} is {_shown(value)}, and should be text")
    return value


def _names(row: Mapping[str, Any]) -> str:
    names = [repr(name) for name in row]
    return ", ".join(names[:_TOLD]) + ", …" * (len(names) > _TOLD) or "no keys"


def _shown(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
