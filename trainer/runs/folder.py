"""Run folder: its name, its lock, and reading and writing of its files. Imports no torch."""

import contextlib
import errno
import fcntl
import itertools
import json
import os
import platform
import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from trainer.checkpoint import CHECKPOINTS
from trainer.config.recipe import Recipe
from trainer.config.redact import redact
from trainer.config.section import config_hash
from trainer.errors import BadInputError
from trainer.host import latest, strict_json
from trainer.host.disks import read_mount
from trainer.host.files import (
    check_writable,
    is_unfinished,
    lines_inside,
    names,
    oddity,
    open_inside,
    open_own,
    read_inside,
    written_whole,
)
from trainer.launch.nodes import LOGS
from trainer.observe.console import warn
from trainer.observe.rows import FILES, PICTURES

_LOCK = ".lock"
RUNS, MANIFEST = latest.RUNS, latest.MANIFEST
TOKEN = ".nodes"  # in a run folder while hosts meet: who reads rank 0's token there has the same folder
KEPT = "begun-from"  # in a run folder: the checkpoint of another run that it began from
# Files of a start that was killed before there was a manifest.
_LEFTOVERS = {_LOCK, LOGS, TOKEN, KEPT}
_FOLDERS = (PICTURES, "tensorboard", "profile", "trackers", "wandb", "mlflow", "export", LOGS, KEPT)
_ADDED_TO = (_LOCK, *FILES.values(), "checksums.jsonl", "anomalies.jsonl", "quarantine.jsonl")


def newest_run(root: Path, recipe: str) -> Path:
    """Returns the newest run folder of a recipe.

    Raises:
        BadInputError: If there is none.
    """

    def is_of_recipe(run: Path) -> bool:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return Path(read_json(run / MANIFEST)["recipe"]).stem == Path(recipe).stem
        return False

    if (found := latest.newest(root, is_of_recipe)) is None:
        raise BadInputError(f"--resume newest: there is no run of {recipe} under {root}; leave it out")
    return found


def checkpoints_of(run: Path) -> Path:
    """Returns the folder of a run's checkpoints.

    Raises:
        BadInputError: If it is a link, as earlier versions made one by checkpoint.folder.
    """
    if (inside := run / CHECKPOINTS).is_symlink():
        raise BadInputError(
            f"{inside}: is a symbolic link to {os.path.realpath(inside)}, and a run's checkpoints lie in its "
            "folder: move that folder to the place of the link; the whole run folder may lie elsewhere"
        )
    return inside


def has_checkpoint(out: Path | None, newest: bool, recipe: str) -> bool:
    """True if the run that a command names has a checkpoint, judged by the folder's name only."""
    try:
        folder = out or (newest_run(RUNS, recipe) if newest else None)
        return folder is not None and any(one.startswith("step-") for one in names(checkpoints_of(folder)))
    except (BadInputError, OSError):  # called by a signal's handler: an error there would end in a traceback
        return False


def read_rows(folder: Path, *kinds: str) -> Iterator[dict[str, Any]]:
    """Yields a run's records of some kinds, one kind after the other; of all kinds if none is named.

    A malformed line is skipped: a kill may cut off the last one.
    """
    for kind in kinds or FILES:
        with contextlib.suppress(FileNotFoundError):
            for line in lines_inside(folder / FILES[kind]):
                with contextlib.suppress(ValueError):
                    row = strict_json.parse(line)
                    if isinstance(row, dict):
                        yield row


def read_json(path: Path) -> Any:
    """Reads a JSON file of a run folder.

    Raises:
        OSError: If it can't be read, or isn't a regular file of the folder.
        ValueError: If it isn't JSON, or is too large.
    """
    return strict_json.parse(read_inside(path, strict_json.LARGEST))


def status_in_place(folder: Path, status: str, why: OSError) -> None:
    """Overwrites the status in the manifest's bytes, for a full disk, where no new file can be written.

    Without it, readers would take the run for one that still trains.
    """
    before = b'\n  "status": "running"'
    after = f'\n  "status": "{"stopped" if status == "stopped" else "failed"}"'.encode().ljust(len(before))
    try:
        file = open_own(folder / MANIFEST, os.O_RDWR)
        try:
            place = os.pread(file, strict_json.LARGEST, 0).rfind(before)
            if place >= 0:
                os.pwrite(file, after, place)
        finally:
            os.close(file)
    except OSError:
        warn(f"{folder / MANIFEST} can't be written ({why.strerror}): its status stays running")


def is_abandoned(folder: Path, facts: Mapping[str, Any]) -> bool:
    """True if a run with the status running was killed: no process holds its lock.

    Never true for a run of this process: closing the file would release its lock.
    """
    if facts.get("status") != "running" or facts.get("pid") == os.getpid():
        return False
    try:
        with os.fdopen(open_inside(folder / _LOCK), "rb") as file:
            asked = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, *_ = struct.unpack("hhqqi", fcntl.fcntl(file, fcntl.F_GETLK, asked))
    except OSError:  # no lock, or a file system without locks: unknown
        return False
    return bool(kind == fcntl.F_UNLCK)


def write_json(path: Path, value: Any) -> None:
    """Replaces a JSON file atomically and durably; secrets in the value are redacted."""
    with written_whole(path) as beside:
        beside.write_text(json.dumps(redact(value), indent=2) + "\n")


# --- claim and lock ---


def new_folder(root: Path, recipe_name: str, recipe: Recipe) -> Path:
    """Makes a new run folder with a unique name: <recipe>-<hash8>-<n>.

    Raises:
        BadInputError: If it can't be made.
    """
    stem = f"{Path(recipe_name).stem}-{config_hash(recipe)[:8]}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            with contextlib.suppress(FileExistsError):
                (folder := root / f"{stem}-{number}").mkdir()
                break
    except OSError as error:
        raise BadInputError(
            f"{root}: can't make a run folder there ({_why(root, error)}); give another run folder"
        ) from error
    return folder


def _why(folder: Path, error: OSError) -> str:
    """Returns the reason of an error; for a dangling link, where mkdir(2) says "File exists", the link."""
    for path in (folder, *folder.parents):
        with contextlib.suppress(OSError):  # of a folder that can't be searched, the error itself says enough
            if path.is_symlink() and not path.exists():
                return f"{path} is a link to {path.readlink()}, which isn't there"
    return str(error.strerror)


def warn_of_loss(folder: Path) -> None:
    """Warns if a folder for runs lies in the container's own layer, and is removed with the container."""
    if read_mount(folder).how == "container layer":
        # The engine would make a missing folder as root's.
        warn(
            f"{folder} lies in the container itself and goes with it: mkdir -p {quote(folder.name)} && "
            'docker run -u "$(id -u):$(id -g)" -v "$PWD"/'
            f"{quote(f'{folder.name}:{folder.absolute()}')} keeps it"
        )


def claim_folder(folder: Path) -> bool:
    """Checks that a folder the user named is writable and empty, except for files of a killed start.

    Returns:
        True if this call made it.

    Raises:
        BadInputError: If it can't be used.
    """
    try:
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        check_writable(folder)
    except OSError as error:
        raise BadInputError(
            f"run folder {folder}: can't be written ({_why(folder, error)}); give another"
        ) from error
    if (folder / MANIFEST).exists():
        raise BadInputError(f"{folder}: holds a run already; give another folder or remove it")
    if any(not _is_left(path) for path in folder.iterdir()):
        raise BadInputError(f"run folder {folder}: isn't empty; give a new or an empty folder")
    return made


def _is_left(path: Path) -> bool:
    name = path.name
    return name in _LEFTOVERS or is_unfinished(name)


def check_inside(folder: Path) -> None:
    """Checks that the files and folders that a run changes lie in its folder, which may itself be a link.

    Raises:
        BadInputError: Naming all that don't.
    """
    checkpoints_of(folder)
    odd = [(name, oddity(folder / name, folder=True)) for name in (*_FOLDERS, CHECKPOINTS)]
    odd += [(name, oddity(folder / name, folder=False)) for name in _ADDED_TO]
    if said := ", ".join(f"{name} {why}" for name, why in odd if why):
        raise BadInputError(
            f"{folder}: {said}; a run writes only below its own folder: bring that back, or have the whole "
            "run folder elsewhere and link that"
        )


def remove_unused(folder: Path) -> None:
    """Removes a run folder in which no run has begun and which no other process has locked."""
    with contextlib.suppress(OSError, BadInputError):
        if all(_is_left(path) for path in folder.iterdir()):
            file = lock(folder)
            shutil.rmtree(folder)
            os.close(file)


def lock(folder: Path) -> int:
    """Locks a run folder for this process, until the process ends or closes the returned file descriptor.

    A record lock (fcntl) and not flock: it belongs to this process alone, not to its forks such as loader
    workers, and it works across hosts on NFS.

    Raises:
        BadInputError: If another process has it, or the folder can't be written.
    """
    try:
        # Hard links are accepted: a copy by hard links is another run, and the file's text stays as it is.
        file = open_own(folder / _LOCK, os.O_RDWR | os.O_CREAT, alone=False)
    except OSError as error:
        raise BadInputError(
            f"{folder}: {folder / _LOCK} can't be written ({error.strerror}); mend that, or give "
            "another folder"
        ) from error
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            warn(f"{folder} can't be locked ({error.strerror}): make sure that no other run writes there")
            return file
        who = os.pread(file, 200, 0).decode(errors="replace").strip() or "unknown"
        os.close(file)
        raise BadInputError(
            f"{folder}: a run is going on there ({who}); wait for it, stop it, or give another run folder"
        ) from error
    if os.fstat(file).st_nlink == 1:
        with contextlib.suppress(OSError):  # a full disk: then another run's message lacks the process
            os.ftruncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)
    return file
