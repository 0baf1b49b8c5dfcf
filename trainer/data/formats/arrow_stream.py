"""Columns of Arrow's stream format, mapped into memory by pyarrow and read up to the end-of-stream marker."""

from pathlib import Path
from typing import Any

from trainer.data.formats.labels import quoted
from trainer.data.formats.signatures import what_lies_at
from trainer.errors import BadInputError, first_line

_END = b"\xff" * 4 + bytes(4)  # mark at the end of a stream


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
        BadInputError: If the marker is missing.
    """
    end = source.tell()
    source.seek(max(0, end - len(_END)))
    if source.read(len(_END)) != _END:
        raise BadInputError(f"{file}: is cut off at byte {end:,}, after a whole batch; save the data again")


def _unreadable(file: Path, error: Exception) -> BadInputError:
    what = "" if isinstance(error, OSError) else what_lies_at(file)
    return BadInputError(f"{file}: can't be read ({what or first_line(error)}); save the data again")
