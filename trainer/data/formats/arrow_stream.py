"""Columns of Arrow's stream format: read where they lie, up to the end that a file must have.

What a file says of itself is checked before it is used: lengths, offsets, and that nothing is inflated.
"""

from pathlib import Path
from typing import Any

from trainer.data.formats.labels import quoted
from trainer.data.formats.signatures import what_it_is
from trainer.errors import BadInputError, first_line
from trainer.host.reading import kind_of

_GOES_ON, _STOPS = b"\xff" * 4, bytes(4)  # before a message of a stream, and what ends it
_BLOCK = 1 << 16
_ROWS = 1 << 20  # that a file of fewer bytes may have
# https://github.com/apache/arrow/tree/main/format: fields of tables in Message.fbs.
_HEADER, _DATA, _COMPRESSION = 2, 1, 3
_KIND, _DICTIONARY = 1, 2


def schema_of(file: Path) -> Any:
    """Returns a file's schema.

    Raises:
        BadInputError: If it can't be read.
    """
    return _opened(file)[1].schema


def column_of(file: Path, name: str) -> Any:
    """Reads one column of a file; the others, which may be large, stay where they are.

    Raises:
        BadInputError: If it can't be read, ends elsewhere, or says what isn't so.
    """
    pyarrow = import_pyarrow()
    schema = schema_of(file)
    place = schema.get_field_index(name)
    if place < 0:
        raise BadInputError(f"{file}: no column {quoted(name)}, which other files have; save the data again")
    if "_view" in (kind := str(schema.field(place).type)):  # whose rows may all be the same gigabyte
        raise BadInputError(f"{file}: column {quoted(name)} holds {kind[:60]}; save the data again")
    try:
        _check_not_compressed(file)
        source, stream = _opened(file, [place])
        table = stream.read_all()
        # Also each offset: pyarrow reads what they lead to, whatever that is.
        table.validate(full=True)
    except (OSError, OverflowError, MemoryError, pyarrow.ArrowException) as error:
        raise _unreadable(file, error) from error
    if table.num_rows > max(_ROWS, source.size()):
        raise BadInputError(
            f"{file}: says that it has {table.num_rows:,} rows in {source.size():,} bytes; save the data "
            "again"
        )
    _check_end(file, source)
    return table.column(name)


def import_pyarrow() -> Any:
    """Returns the package.

    Raises:
        BadInputError: If it isn't installed.
    """
    try:
        import pyarrow
    except ModuleNotFoundError as error:
        raise BadInputError(
            "data.name=hf needs pyarrow, which isn't installed: pip install pyarrow (the images for "
            "development have it)"
        ) from error
    return pyarrow


def _opened(file: Path, columns: list[int] | None = None) -> tuple[Any, Any]:
    """A file mapped into memory, and what reads its batches.

    Raises:
        BadInputError: If it can't be read.
    """
    pyarrow = import_pyarrow()
    if kind_of(file) == "other":  # a pipe would wait for who writes to it
        raise BadInputError(f"{file}: isn't a regular file; save the data again")
    try:
        source = pyarrow.memory_map(str(file))
        # Without threads of its own, which a fork would leave behind.
        options = pyarrow.ipc.IpcReadOptions(use_threads=False, included_fields=columns)
        return source, pyarrow.ipc.open_stream(source, options=options)
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(file, error) from error


def _check_not_compressed(file: Path) -> None:
    """Looks at each message: `save_to_disk` compresses none, and a few bytes inflate to any size.

    Raises:
        BadInputError: If one is compressed.
    """
    pyarrow = import_pyarrow()
    with pyarrow.memory_map(str(file)) as source:
        for message in pyarrow.ipc.MessageReader.open_stream(source):
            if _compressed(message.metadata.to_pybytes()):
                raise BadInputError(
                    f"{file}: its columns are compressed, so that rows can't be read one by one; save the "
                    "data again without compression (save_to_disk does so)"
                )


def _compressed(message: bytes) -> bool:
    """Whether a message holds compressed rows, which pyarrow reads from it but doesn't tell.

    pyarrow has verified the flatbuffer (https://flatbuffers.dev/internals) before.
    """
    table = _number(message, 0, 4)
    header = _field(message, table, _HEADER)
    if not header:
        return False
    rows = header + _number(message, header, 4)
    kind = _field(message, table, _KIND)
    if kind and message[kind] == _DICTIONARY:
        data = _field(message, rows, _DATA)
        rows = data + _number(message, data, 4)
    elif not kind or message[kind] < _DICTIONARY:
        return False  # the schema
    return bool(_field(message, rows, _COMPRESSION))


def _field(message: bytes, table: int, number: int) -> int:
    """Returns where a field of a table lies; 0 if it is absent."""
    facts = table - _number(message, table, 4)
    at = 4 + 2 * number
    offset = _number(message, facts + at, 2) if at < _number(message, facts, 2) else 0
    return table + offset if offset else 0


def _number(message: bytes, at: int, size: int) -> int:
    return int.from_bytes(message[at : at + size], "little", signed=True)


def _check_end(file: Path, source: Any) -> None:
    """Makes sure that a stream's end stands behind its last batch.

    A reader takes the end of the file for the end of the stream, as if nothing were missing.

    Raises:
        BadInputError: If it doesn't, or something else follows.
    """
    end = source.tell()
    source.seek(0)
    begin = source.read(len(_GOES_ON))
    mark = _GOES_ON + _STOPS if begin == _GOES_ON else _STOPS
    source.seek(max(0, end - len(mark)))
    if source.read(len(mark)) != mark:
        raise BadInputError(f"{file}: is cut off at byte {end:,}, after a whole batch; save the data again")
    if any(piece.strip(b"\0") for piece in iter(lambda: source.read(_BLOCK), b"")):
        raise BadInputError(
            f"{file}: {source.size() - end:,} bytes lie behind its end at byte {end:,}, and may hold rows; "
            "save the data again"
        )


def _unreadable(file: Path, error: Exception) -> BadInputError:
    reason = first_line(error)
    if not isinstance(error, OSError):
        with file.open("rb") as opened:
            reason = what_it_is(opened.read(_BLOCK)) or reason
    return BadInputError(f"{file}: can't be read ({reason}); save the data again")
