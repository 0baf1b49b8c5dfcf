"""Columns of Arrow's stream format, mapped into memory and read up to the end-of-stream marker.

Lengths and offsets in a file are validated before use; compressed columns are refused.
"""

from pathlib import Path
from typing import Any

from trainer.data.formats.labels import quoted
from trainer.data.formats.signatures import what_it_is
from trainer.errors import BadInputError, first_line
from trainer.host.reading import kind_of

_CONTINUATION, _END = b"\xff" * 4, bytes(4)  # before each message of a stream, and at its end
_BLOCK = 1 << 16
_ROWS = 1 << 20  # rows that a file of fewer bytes may have
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
    """Reads one column of a file; others, which may be large, aren't read.

    Raises:
        BadInputError: If the file can't be read, is truncated or invalid.
    """
    pyarrow = import_pyarrow()
    schema = schema_of(file)
    index = schema.get_field_index(name)
    if index < 0:
        raise BadInputError(f"{file}: no column {quoted(name)}, which other files have; save the data again")
    if "_view" in (kind := str(schema.field(index).type)):  # all rows may refer to the same gigabyte
        raise BadInputError(f"{file}: column {quoted(name)} holds {kind[:60]}; save the data again")
    try:
        _check_not_compressed(file)
        source, stream = _opened(file, [index])
        table = stream.read_all()
        # Including each offset: pyarrow reads memory at unchecked offsets.
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
    """Imports pyarrow.

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
    """Maps a file into memory and opens its stream.

    Raises:
        BadInputError: If it can't be read.
    """
    pyarrow = import_pyarrow()
    if kind_of(file) == "other":  # opening a pipe would block
        raise BadInputError(f"{file}: isn't a regular file; save the data again")
    try:
        source = pyarrow.memory_map(str(file))
        # Without threads, which a fork doesn't copy.
        options = pyarrow.ipc.IpcReadOptions(use_threads=False, included_fields=columns)
        return source, pyarrow.ipc.open_stream(source, options=options)
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(file, error) from error


def _check_not_compressed(file: Path) -> None:
    """Checks that no message is compressed: `save_to_disk` compresses none, and a few bytes may be gigabytes.

    Raises:
        BadInputError: If a message is compressed.
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
    """True if a message holds compressed rows, which pyarrow doesn't expose.

    pyarrow has already verified the flatbuffer (https://flatbuffers.dev/internals).
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
    """Returns the offset of a field of a flatbuffer table; 0 if it is absent."""
    vtable = table - _number(message, table, 4)
    at = 4 + 2 * number
    offset = _number(message, vtable + at, 2) if at < _number(message, vtable, 2) else 0
    return table + offset if offset else 0


def _number(message: bytes, at: int, size: int) -> int:
    return int.from_bytes(message[at : at + size], "little", signed=True)


def _check_end(file: Path, source: Any) -> None:
    """Checks that the end-of-stream marker follows the last batch: pyarrow accepts a file without it.

    Raises:
        BadInputError: If the marker is missing, or other bytes follow it.
    """
    end = source.tell()
    source.seek(0)
    begin = source.read(len(_CONTINUATION))
    mark = _CONTINUATION + _END if begin == _CONTINUATION else _END
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
