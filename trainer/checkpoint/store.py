"""Checkpoints of a run: atomic writes, listing, search of the newest intact one, removal of old ones.

A checkpoint is written to a hidden folder, synced and renamed, so that after a crash at any time a folder
with the name of a checkpoint is complete.
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
    """Checkpoint in a listing.

    Attributes:
        step: Step of the run.
        path: Folder.
        size: Size in bytes.
        time: Time of writing, in seconds since 1970.
        problem: Reason why it is damaged; None if it is intact or wasn't verified.
    """

    step: int
    path: Path
    size: int
    time: float
    problem: str | None


def write(
    folder: Path, step: int, tensors: Mapping[str, Mapping[str, torch.Tensor]], state: Mapping[str, Any]
) -> Path:
    """Commits a checkpoint of tensors, by file and name, and a state."""
    return commit(folder, step, contents(step, tensors, state), lambda: False)


def commit(folder: Path, step: int, contents: Contents, abandoned: Callable[[], bool]) -> Path:
    """Writes a checkpoint and returns its folder, once it is synced to the disk.

    An existing checkpoint of the step is replaced: the new folder is complete before the old one is removed,
    so that one of the two always exists, on any file system.

    Args:
        folder: Folder of the checkpoints; created if its parent exists.
        step: Step as given to `contents`.
        contents: Contents of the files; consumed.
        abandoned: Called between tensors; if it returns True, the write is undone.

    Raises:
        Abandoned: If the write was abandoned.
        OSError: If the files can't be written; an existing checkpoint stays.
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
    """Creates the hidden folder that all ranks write their files of a checkpoint to; returns it.

    Args:
        folder: Folder of the checkpoints; created if its parent exists.
        name: From `shared_name`.
    """
    files.make_folder(folder)
    files.make_folder(folder / name)
    return folder / name


def shared_name(step: int, token: int) -> str:
    """Returns the name of that folder, equal on all ranks; `token` distinguishes writes of the same step."""
    return f".{folder_name(step)}.tmp-{token}"


def commit_part(beside: Path, contents: Contents, abandoned: Callable[[], bool]) -> dict[str, str]:
    """Writes and syncs a rank's files of a checkpoint; returns their SHA-256 by name.

    Raises:
        Abandoned: If the write was abandoned.
        OSError: If the files can't be written.
    """
    return write_part(beside, {name: _until(abandoned, parts) for name, parts in contents.items()})


def commit_shared(
    beside: Path, step: int, shared: Contents, hashes: Mapping[str, str], abandoned: Callable[[], bool]
) -> Path:
    """Completes a checkpoint from the files that all ranks have written, and returns its folder.

    Args:
        beside: Hidden folder from `begin_shared`.
        step: Step of the checkpoint.
        shared: From `folder.shared_contents`.
        hashes: SHA-256 of all ranks' files.
        abandoned: Called once.

    Raises:
        Abandoned: If the write was abandoned.
        OSError: If it can't be written; an existing checkpoint stays.
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
    """Renames a finished folder to the final name."""
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
    """Lists the checkpoints in a folder, newest first; [] if there is no folder.

    Args:
        folder: Folder of the checkpoints.
        verify: True to read and verify all of them.
        advance: Called with numbers of verified bytes, from several threads.

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
    """Reads the newest intact checkpoint.

    Args:
        folder: Folder of the checkpoints.
        foreign: Returns the reason why a state isn't this run's, or None.

    Returns:
        The checkpoint, or None; and a line for each newer one: its name and the reason why it was skipped.

    Raises:
        OSError: If the folder can't be read.
        Unreadable: If a checkpoint can't be read now: it may be intact, and resuming from an older one would
            repeat steps and remove it.
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
    """Renames checkpoints of other runs, so that they aren't resumed from or pruned.

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
    """Returns the step of the newest intact checkpoint, or None.

    Args:
        folder: Folder of the checkpoints.
        known_good: Steps of checkpoints that were verified before.
        first: Step that is returned if its checkpoint still exists.

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
    """Removes checkpoints older than the newest intact ones.

    Newer damaged ones are kept for inspection, and don't count.

    Args:
        folder: Folder of the checkpoints.
        keep_last: Number of intact checkpoints to keep, at least 1.
        best: Step that is kept whatever its age.
        known_good: Steps of checkpoints that were verified before.

    Returns:
        The removed steps.

    Raises:
        OSError: If one can't be removed; each is complete or no longer listed.
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
    """Removes the hidden folders of killed writes and removals.

    Only the owner of the folder may call it, before it writes: on a shared file system a process id is no
    evidence, so every hidden folder counts as a leftover.

    Returns:
        Names of the removed folders.

    Raises:
        OSError: If one can't be removed.
    """
    found = [name for name in files.names(folder) if _LEFTOVER.fullmatch(name)]
    for name in found:
        # Renamed first, so that a writer that is still alive can't publish a half-removed folder.
        gone = folder / name.replace(".tmp-", ".gone-")
        files.rename(folder / name, gone)
        files.remove(gone)
    return found
