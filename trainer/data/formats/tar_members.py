"""Members of a tar archive, with a check of its end: `tarfile` takes a damaged header for the end."""

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from trainer.data.formats.files import readable
from trainer.data.formats.signatures import what_it_is
from trainer.data.left_out import LeftOut, one, tally
from trainer.errors import BadInputError

_BLOCK, _CHUNK = tarfile.BLOCKSIZE, 1 << 20
_MAGIC, _MAGIC_AT = b"ustar", 257
_MEND = "make the shard again"
_LONGEST_NAME, _LARGEST_HEADER = 4096, 1 << 20
_TALLIED = 1000  # entries of `left_out` after which they are summed
_MORE_HEADERS = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)


class _Bounded(tarfile.TarInfo):
    """TarInfo that bounds extended headers: `tarfile` reads any size that they state."""

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in _MORE_HEADERS and self.size > _LARGEST_HEADER:
            raise ValueError(f"a header of {self.size:,} bytes at byte {tar.offset:,}")
        member: tarfile.TarInfo = super()._proc_member(tar)  # type: ignore[misc]
        return member


def members(file: Path, left_out: list[LeftOut]) -> Iterator[tarfile.TarInfo]:
    """Yields the regular files of an archive.

    Args:
        file: The archive.
        left_out: Receives members that aren't yielded, and bytes behind the archive's end.

    Raises:
        BadInputError: If the archive is damaged or truncated, or has links or unsafe names.
        OSError: If it can't be read.
    """
    try:
        with _opened(file) as tar:
            for member in tar:
                tar.members.clear()  # type: ignore[attr-defined]  # `tarfile` keeps all members, 1 kB each
                name = readable(os.fsencode(member.name))
                if len(member.name) > _LONGEST_NAME:
                    raise BadInputError(
                        f"{file}: a name of {len(member.name):,} letters at byte {member.offset:,}; {_MEND}"
                    )
                if member.size < 0:  # `tarfile` would seek back to the same header, endlessly
                    raise BadInputError(f"{file}: damaged header at byte {member.offset:,}; {_MEND}")
                if member.name.startswith("/") or ".." in member.name.split("/"):
                    raise BadInputError(f"{file}: '{name}' leads out of the archive; {_MEND}")
                if member.islnk() or member.issym():
                    raise BadInputError(
                        f"{file}: '{name}' is a link; make the shard with --dereference --hard-dereference"
                    )
                if reason := _left_out(member):
                    left_out.append(one(reason, f"{file.name}: '{name}'"))
                    if len(left_out) > _TALLIED:
                        left_out[:] = tally(left_out)
                elif member.isfile():
                    yield member
            end = tar.offset
    # MemoryError, OverflowError and RecursionError: huge sizes, nested extended headers.
    except (tarfile.TarError, ValueError, MemoryError, OverflowError, RecursionError) as error:
        raise BadInputError(f"{file}: not a readable tar file ({error})") from error
    left_out += _behind(file, end)


def _opened(file: Path) -> tarfile.TarFile:
    try:
        return tarfile.open(file, "r:", encoding="utf-8", errors="surrogateescape", tarinfo=_Bounded)
    except tarfile.TarError as error:
        with file.open("rb") as stream:
            what = what_it_is(stream.read(_BLOCK))
        raise BadInputError(f"{file}: not a readable tar file ({what or error})") from error


def _left_out(member: tarfile.TarInfo) -> str:
    """Returns the reason for leaving out a member; "" for a file that is read, and for a folder."""
    if any(part.startswith(".") and part != "." for part in member.name.split("/")):
        return "" if member.isdir() else "hidden member{s}"
    if member.issparse():
        return "sparse member{s} (tar -S)"
    return (
        ""
        if member.isfile() or member.isdir()
        else "special member{s} (a pipe, a device, a label of the archive)"
    )


class _Rest(NamedTuple):
    """Bytes behind the last member.

    Attributes:
        first: Offset of the first nonzero byte; -1 if there is none.
        last: Offset behind the last nonzero byte.
        header: Offset of a member's header; -1 if there is none.
    """

    first: int = -1
    last: int = -1
    header: int = -1


def _behind(file: Path, end: int) -> Iterator[LeftOut]:
    """Checks the bytes after the last member, which should be two or more blocks of zeros.

    Yields:
        Other bytes that are left out.

    Raises:
        BadInputError: If they may hold samples.
    """
    size = file.stat().st_size
    if end >= size:
        reason = "end{s} of an archive, which has no mark, as if it were cut off"
        yield one(reason, f"{file.name}, at byte {size:,}")
        return
    rest = _look(file, end)
    if rest.first < 0:
        return
    if rest.first < end + _BLOCK:
        what = "cut off in a header" if size < end + _BLOCK else "damaged header"
        raise BadInputError(f"{file}: {what} at byte {end:,}, and more may lie behind it; {_MEND}")
    if rest.header >= 0:
        raise BadInputError(
            f"{file}: ends at byte {end:,}, and goes on with a member at byte {rest.header:,}: two archives "
            f"in one file, or a damaged one; {_MEND}"
        )
    if rest.first < end + 2 * _BLOCK:
        raise BadInputError(
            f"{file}: one block of zeros at byte {end:,}, where an end has two: a damaged header; {_MEND}"
        )
    entry = one("byte{s} behind the end of an archive", f"{file.name}, from byte {rest.first:,}")
    yield entry.model_copy(update={"count": rest.last - rest.first})


def _look(file: Path, end: int) -> _Rest:
    rest, at, before = _Rest(), end, b""
    with file.open("rb") as stream:
        stream.seek(end)
        while chunk := stream.read(_CHUNK):
            if filled := chunk.rstrip(b"\0"):
                if rest.first < 0:
                    first = at + len(chunk) - len(chunk.lstrip(b"\0"))
                    rest = rest._replace(first=first)
                rest = rest._replace(last=at + len(filled))
                window = before + chunk
                if rest.header < 0 and (offset := _header_in(window)) >= 0:
                    rest = rest._replace(header=at - len(before) + offset)
            before, at = chunk[-_BLOCK:], at + len(chunk)
    return rest


def _header_in(window: bytes) -> int:
    """Returns the offset of a member's header; -1 if there is none."""
    at = window.find(_MAGIC)
    while at >= 0:
        begin = at - _MAGIC_AT
        if begin >= 0 and _is_header(window[begin : begin + _BLOCK]):
            return begin
        at = window.find(_MAGIC, at + 1)
    return -1


def _is_header(block: bytes) -> bool:
    try:
        tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.TarError, ValueError):
        return False
    return True
