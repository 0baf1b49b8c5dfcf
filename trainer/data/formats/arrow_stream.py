"""Columns of Arrow's stream format, mapped into memory by pyarrow and read up to the end-of-stream marker."""

from pathlib import Path
from typing import Any

from trainer.data.formats.labels import quoted
from trainer.data.formats.signatures import what_lies_at
from trainer.errors import BadInputError, first_line
from trainer.host.reading import kind_of

_END, _BLOCK = b"\xff" * 4 + bytes(4), 1 << 16  # mark at the end of a stream


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
        at, batches = source.tell(), list[Any]()
        source.seek(0)
        mapped = source.read_buffer()
        source.seek(at)
        for batch in stream:
            if _compressed(batch.column(0), mapped):
                raise BadInputError(
                    f"{file}: its columns are compressed, so that rows can't be read one by one; save the "
                    "data again without compression (save_to_disk does so)"
                )
            batches.append(batch)
        table = pyarrow.Table.from_batches(batches, stream.schema)
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
    if kind_of(file) == "other":  # opening a pipe would block
        raise BadInputError(f"{file}: isn't a regular file; save the data again")
    try:
        source = pyarrow.memory_map(str(file))
        # Without threads, which a fork doesn't copy.
        options = pyarrow.ipc.IpcReadOptions(use_threads=False, included_fields=columns)
        return source, pyarrow.ipc.open_stream(source, options=options)
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(file, error) from error


def _compressed(column: Any, mapped: Any) -> bool:
    """True if a column lies anywhere but in the mapped file: pyarrow has inflated it."""
    end = mapped.address + mapped.size
    return any(one and one.size and not mapped.address <= one.address < end for one in column.buffers())


def _check_end(file: Path, source: Any) -> None:
    """Checks that the end-of-stream marker follows the last batch: pyarrow accepts a file without it.

    Raises:
        BadInputError: If the marker is missing, or other bytes follow it.
    """
    end = source.tell()
    source.seek(max(0, end - len(_END)))
    if source.read(len(_END)) != _END:
        raise BadInputError(f"{file}: is cut off at byte {end:,}, after a whole batch; save the data again")
    if any(piece.strip(b"\0") for piece in iter(lambda: source.read(_BLOCK), b"")):
        raise BadInputError(
            f"{file}: {source.size() - end:,} bytes lie behind its end at byte {end:,}, and may hold rows; "
            "save the data again"
        )


def _unreadable(file: Path, error: Exception) -> BadInputError:
    what = "" if isinstance(error, OSError) else what_lies_at(file)
    return BadInputError(f"{file}: can't be read ({what or first_line(error)}); save the data again")
