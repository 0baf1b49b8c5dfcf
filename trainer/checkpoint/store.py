"""All checkpoints of a run: written whole or not at all, listed, the newest good one found, old ones removed.

A checkpoint is written beside under a hidden name, synced, renamed: whenever the power goes, what has the
name of a checkpoint is whole.
"""

import contextlib
import errno
import itertools
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainer.checkpoint.folder import (
    Checkpoint,
    Contents,
    Damaged,
    Unreadable,
    contents,
    folder_name,
    parse_name,
    problem,
    quietly,
    read,
    read_state,
    write_files,
    write_part,
)
from trainer.host import files

_LEFTOVER = re.compile(r"\.step-[0-9.]+\.(tmp|gone)-[0-9-]+")


class Abandoned(Exception):  # noqa: N818  (the outcome of a request)
    """Raised in a write that was stopped before its checkpoint was complete."""


class Entry(NamedTuple):
    """A checkpoint in a listing.

    Attributes:
        step: What it was written as.
        path: Its folder.
        size: Bytes.
        time: When it was written, in seconds since 1970.
        problem: Why it can't be trusted; None if it can, or if it wasn't verified.
    """

    step: int
    path: Path
    size: int
    time: float
    problem: str | None


def write(
    folder: Path, step: int, tensors: Mapping[str, Mapping[str, torch.Tensor]], state: Mapping[str, Any]
) -> Path:
    """`commit` of these tensors, by file and by name, and of this state."""
    return commit(folder, step, contents(step, tensors, state), lambda: False)


def commit(folder: Path, step: int, contents: Contents, abandoned: Callable[[], bool]) -> Path:
    """Writes a checkpoint and returns its folder; then it is on the disk.

    A step that is there already is replaced: the new folder stands beside the old one before that goes, so
    that at no moment neither is there, on any file system.

    Args:
        folder: Of the checkpoints; made if its parent exists.
        step: As given to `contents`.
        contents: Used up.
        abandoned: Asked between tensors; when it is true, nothing remains.

    Raises:
        Abandoned: If it was.
        OSError: If the files can't be written; what was there before is untouched.
    """
    beside = _hidden(folder / folder_name(step), "tmp")
    files.make_folder(folder)
    try:
        files.make_folder(beside)
        write_files(beside, {name: _until(abandoned, parts) for name, parts in contents.items()})
        if abandoned():
            raise Abandoned
        return _publish(beside, folder, step)
    except Exception:
        with contextlib.suppress(OSError):
            files.remove(beside)
        raise


def begin_shared(folder: Path, name: str) -> Path:
    """Makes the hidden folder that all ranks write their parts of a checkpoint to; returns it.

    Args:
        folder: Of the checkpoints; made if its parent exists.
        name: From `shared_name`.
    """
    files.make_folder(folder)
    files.make_folder(folder / name)
    return folder / name


def shared_name(step: int, token: int) -> str:
    """The name of that folder, the same for all ranks by a number that no other write of the step has."""
    return f".{folder_name(step)}.tmp-{token}"


def commit_part(beside: Path, contents: Contents, abandoned: Callable[[], bool]) -> dict[str, str]:
    """Writes a rank's part of a checkpoint; returns its files' hashes: then they are on the disk.

    Raises:
        Abandoned: If it was stopped.
        OSError: If the files can't be written.
    """
    return write_part(beside, {name: _until(abandoned, parts) for name, parts in contents.items()})


def commit_shared(
    beside: Path, step: int, shared: Contents, hashes: Mapping[str, str], abandoned: Callable[[], bool]
) -> Path:
    """Makes a checkpoint of the parts that all ranks have written, and returns its folder.

    Args:
        beside: From `begin_shared`.
        step: Its step.
        shared: From `folder.shared_contents`.
        hashes: Of all ranks' files.
        abandoned: Asked once more.

    Raises:
        Abandoned: If it was stopped.
        OSError: If it can't be written; what was there before is untouched.
    """
    write_files(beside, shared, hashes)
    if abandoned():
        raise Abandoned
    return _publish(beside, beside.parent, step)


def _until(abandoned: Callable[[], bool], parts: Iterable[files.Buffer]) -> Iterator[files.Buffer]:
    for part in parts:
        if abandoned():
            raise Abandoned
        yield part


def _publish(beside: Path, folder: Path, step: int) -> Path:
    """Gives a finished folder the name that readers look for."""
    final = folder / folder_name(step)
    old = [(number, path) for known, number, path in _folders(folder) if known == step]
    if not old:
        files.rename(beside, final)
        files.sync_folder(folder)
        return final
    # Readers take the higher number. Swapping two folders at once is only possible on some file systems.
    second = final.with_name(f"{final.name}.{max(number for number, _ in old) + 1}")
    files.rename(beside, second)
    files.sync_folder(folder)
    gone: list[Path] = []
    try:
        for _, path in old:
            gone.append(_put_aside(path))
        files.rename(second, final)
        files.sync_folder(folder)
    finally:
        for path in gone:
            with contextlib.suppress(OSError):  # the next start removes it
                files.remove(path)
    return final


def _hidden(path: Path, why: str) -> Path:
    return path.with_name(f".{path.name}.{why}-{os.getpid()}-{time.monotonic_ns()}")


def _put_aside(path: Path) -> Path:
    hidden = _hidden(path, "gone")
    files.rename(path, hidden)
    return hidden


def _folders(folder: Path) -> list[tuple[int, int, Path]]:
    """Returns the folders named as checkpoints, newest first: step, number at that step, path."""
    if odd := files.oddity(folder, folder=True):
        raise OSError(errno.ENOTDIR, odd, str(folder))
    named = ((parse_name(name), folder / name) for name in files.names(folder))
    return sorted(((*parsed, path) for parsed, path in named if parsed), reverse=True)


def listing(folder: Path, verify: bool = False, advance: Callable[[int], object] = quietly) -> list[Entry]:
    """The checkpoints in a folder, newest first; none if there is no folder.

    Args:
        verify: Whether to read them all and look for problems.
        advance: Called with numbers of bytes that were verified, from several threads.

    Raises:
        OSError: If the folder can't be read.
    """
    entries = []
    for step, _, path in _folders(folder):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            size, written = files.size_and_time(path)
            entries.append(Entry(step, path, size, written, problem(path, advance) if verify else None))
    return entries


def names_of(folder: Path) -> list[str]:
    """Returns the names of the checkpoints in a folder, newest first; they aren't verified.

    Raises:
        OSError: If the folder can't be read.
    """
    return [path.name for _, _, path in _folders(folder)]


def newest_good(
    folder: Path, foreign: Callable[[Mapping[str, Any]], str | None] | None = None
) -> tuple[Checkpoint | None, list[str]]:
    """Reads the newest checkpoint that can be trusted.

    Args:
        foreign: Returns why a state isn't this run's, or None.

    Returns:
        The checkpoint, None if there is no good one; a line for each newer one: its name and the reason.

    Raises:
        OSError: If the folder can't be read.
        Unreadable: If a checkpoint can't: it may be good, and what came after it would be done again and its
            newer neighbors removed.
    """
    skipped: list[str] = []
    for _, _, path in _folders(folder):
        try:
            found = read(path)
            if foreign is None or (reason := foreign(found.state)) is None:
                return found, skipped
            skipped.append(f"{path.name}: {reason}")
        except Unreadable as error:
            raise Unreadable(f"{path.name}: {error}") from error
        except Damaged as damage:
            skipped.append(f"{path.name}: {damage}")
    return None, skipped


def set_foreign_aside(folder: Path, foreign: Callable[[Mapping[str, Any]], str | None]) -> list[str]:
    """Renames checkpoints of other runs, so that they neither count as this run's newest ones nor are pruned.

    Returns:
        Their new names.

    Raises:
        OSError: If one can't be.
    """
    aside = list[str]()
    for _, _, path in _folders(folder):
        with contextlib.suppress(Damaged, Unreadable):
            if foreign(read_state(path)) is not None:
                taken = set(files.names(folder))
                names = (
                    f"foreign-{path.name}{f'-{number}' if number else ''}" for number in itertools.count()
                )
                name = next(name for name in names if name not in taken)
                files.rename(path, folder / name)
                aside.append(name)
    return aside


def newest_step(folder: Path, known_good: Collection[int], first: int | None) -> int | None:
    """Returns the step of the newest checkpoint that can be trusted, or None.

    Args:
        known_good: Steps that needn't be read to know that they are good.
        first: The one that is it, if it is still there.

    Raises:
        OSError: If the folder can't be read.
    """
    entries = _folders(folder)
    if first is not None and any(step == first for step, _, _ in entries):
        return first
    good = (step for step, _, path in entries if step in known_good or problem(path) is None)
    return next(good, None)


def prune(
    folder: Path, keep_last: int, best: int | None = None, known_good: Collection[int] = ()
) -> list[int]:
    """Removes what is older than the newest good checkpoints.

    Damaged ones that are newer stay for people to look at; they don't count.

    Args:
        keep_last: How many good ones to keep, at least 1.
        best: A step that is kept whatever its age.
        known_good: Steps that needn't be read again to know that they are good.

    Returns:
        The steps that were removed.

    Raises:
        OSError: If they can't be removed; each is whole or gone from the listing.
    """
    if keep_last < 1:
        raise ValueError("at least one checkpoint is kept")
    entries = _folders(folder)
    good = 0
    doomed = []
    for step, _, path in entries if len(entries) > keep_last else ():
        if good < keep_last:
            good += step in known_good or problem(path) is None
        elif step != best:
            doomed.append((step, path))
    gone = [_put_aside(path) for _, path in doomed]
    if gone:
        files.sync_folder(folder)
    for path in gone:
        files.remove(path)
    return [step for step, _ in doomed]


def remove_leftovers(folder: Path) -> list[str]:
    """Removes what killed writes and removals left behind.

    Only for the one that owns the folder, before it writes: a process id says nothing on a shared file
    system, so whatever is hidden here is taken for a leftover.

    Returns:
        Names of what was removed.

    Raises:
        OSError: If something can't be.
    """
    found = [name for name in files.names(folder) if _LEFTOVER.fullmatch(name)]
    for name in found:
        # Renamed first: a writer that is still alive after all can't publish a half of it then.
        gone = folder / name.replace(".tmp-", ".gone-")
        files.rename(folder / name, gone)
        files.remove(gone)
    return found
