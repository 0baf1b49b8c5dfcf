"""The run folder: how it is named and claimed, and what its manifest says. Every command reads runs by this.

Imports no torch.
"""

import contextlib
import errno
import fcntl
import itertools
import json
import os
import platform
import shutil
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainer.checkpoint import FOLDER
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
    oddity,
    open_inside,
    open_own,
    read_inside,
    written_whole,
)
from trainer.launch.nodes import EXIT_CODE, LOGS, MEETING
from trainer.observe.console import warn
from trainer.observe.rows import FILES
from trainer.train.altered import hashes_of_rows

FORMAT = 4  # of a run folder: the names in its manifest and rows, and of the files that hold these
_LOCK = ".lock"
# What a start leaves that was killed before there was a manifest.
RUNS, MANIFEST = latest.RUNS, latest.MANIFEST
KEPT = "begun-from"  # in a run folder: the checkpoint of another run that it began from
_LEFTOVERS = {_LOCK, MEETING, LOGS, EXIT_CODE, KEPT}
_FOLDERS = (FOLDER, "tensorboard", "profile", "trackers", "wandb", "mlflow", "export", LOGS, KEPT)
_ADDED_TO = (_LOCK, *FILES.values(), "checksums.jsonl", "anomalies.jsonl", "quarantine.jsonl")


# --- what a manifest says ---


class _Device(BaseModel):
    kind: Literal["cpu", "cuda"]


class Attempt(BaseModel):
    """One start of a run.

    Attributes:
        started: When.
        step: Steps done before it.
        ranks: How many trained.
        threads: Intra-op threads of each.
        log_every: Steps between its rows of metrics: a row's loss is their mean.
        changed: What of the configuration was changed, by `--resume force` or a later end: "key: before, now
            after".
        extends: Whether it went on beyond the end that a run had reached, or in such an extension.
        config_hash: Of its configuration.
        jsonl: Whether it wrote rows to metrics.jsonl and the files beside it.
        checksums: Whether it wrote rows to checksums.jsonl.
        arithmetic: Number of the arithmetic that it computed by, see `trainer.version`; 1 if none is written.
        job: Of the cluster that started it: its number, restarts and nodes; empty elsewhere.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    started: str
    step: int = Field(ge=0)
    ranks: int = Field(ge=1)
    threads: int = Field(ge=1)
    log_every: int = Field(ge=1)
    changed: list[str]
    extends: bool = False
    config_hash: str
    jsonl: bool
    checksums: bool
    arithmetic: int = Field(1, ge=1)
    job: dict[str, str]


class BegunFrom(BaseModel):
    """The checkpoint of another run that a run began from.

    Attributes:
        folder: That run's, where it was then.
        run_id: Whose checkpoint it is.
        step: Of the checkpoint.
        hash: SHA-256 of its SHA256SUMS, and so of all of it.
        differs: What is another in the new run, of configuration and data: "key: there, now here".
    """

    model_config = ConfigDict(strict=True, frozen=True)

    folder: str
    run_id: str
    step: int = Field(ge=0)
    hash: str
    differs: list[str]


class Pretrained(BaseModel):
    """What a run started from.

    Attributes:
        source: As it was asked for.
        revision: On the hub the commit; of torchvision's weights the file; None for a path.
        sha256: Of the safetensors file that was read.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    source: str
    revision: str | None
    sha256: str


class Manifest(BaseModel):
    """Of a run's manifest, what decides how to go on with it, and what a replay needs.

    Attributes:
        config: Its resolved configuration, without secrets.
        config_hash: Of that.
        threads: Intra-op threads per rank; part of the arithmetic on a CPU.
        device: Its kind: part of the arithmetic, too.
        world_size: Number of ranks.
        status: How it ended; running also if it was killed.
        fingerprint: What its data was, see `trainer.train.run.data_of`.
        pretrained: What its weights were at first, where they were somebody's.
        attempts: All of them, the last one is the newest.
        run_id: Which its checkpoints name, too.
        steps: At its end.
        weights: Hashes of the final weights by their files' names.
        out_of_patience: Evaluations in a row that were no better than the best, where these ended it; else 0.
        begun_from: Where it began, if that was another run's checkpoint (`from` in the file).
        trackers: Ids of its runs at trackers, by their names in `log.to`.
        trust: Its own code and whose it is, see `trainer.train.trust`.
        rows: Hashes of its files of rows, when the newest attempt ended.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    config: dict[str, Any]
    config_hash: str
    threads: int = Field(ge=1, le=1 << 16)
    device: _Device
    world_size: int = Field(ge=1, le=1 << 20)
    status: Literal["running", "stopped", "failed", "finished", "diverged"]
    fingerprint: dict[str, str]
    pretrained: Pretrained | None = None
    attempts: list[Attempt] = Field(min_length=1)
    run_id: str
    steps: int = Field(ge=1)
    weights: dict[str, str]
    out_of_patience: int = Field(0, ge=0)
    begun_from: BegunFrom | None = Field(None, alias="from")
    trackers: dict[str, str] = Field(default_factory=dict)
    trust: dict[str, list[str]] = Field(default_factory=dict)
    rows: dict[str, str] = Field(default_factory=dict)

    @property
    def arithmetic(self) -> int:
        """Number of the arithmetic that its newest attempt computed by."""
        return self.attempts[-1].arithmetic

    @property
    def extended(self) -> bool:
        """Whether it was ever given a later end after it had reached one."""
        return any(attempt.extends for attempt in self.attempts)

    def foreign(self, state: Mapping[str, Any]) -> str | None:
        """Why a checkpoint with this state isn't one of this run, or None."""
        if (run_id := state.get("run_id")) != self.run_id:
            return f"it is of another run ({str(run_id)[:8]}; this one is {self.run_id[:8]})"
        if state.get("config_hash") not in {one.config_hash for one in self.attempts}:
            return "its configuration is none that this run was trained with"
        return None


@dataclass(frozen=True)
class RunFolder:
    """A run folder that was read.

    Attributes:
        path: The folder.
        facts: Its manifest, as it stands there.
        manifest: What was checked of it.
    """

    path: Path
    facts: Mapping[str, Any]
    manifest: Manifest


class _NoManifestError(BadInputError):
    """There is none, so that nothing was trained there."""


def read_facts(folder: Path) -> dict[str, Any]:
    """A run's manifest as it stands there; only its format is looked at.

    Raises:
        BadInputError: If there is none, it can't be read, or another version of trainer wrote it.
    """
    path = folder / MANIFEST
    try:
        facts = strict_json.parse(read_inside(path, strict_json.LARGEST))
        if not isinstance(facts, dict):
            raise ValueError("not a JSON object")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _NoManifestError(
            f"{folder}: not a run folder (it holds no {MANIFEST}{latest.nor_below_runs(folder)}); give one "
            "that trainer train made"
        ) from error
    except OSError as error:
        raise BadInputError(f"{path}: can't be read ({error.strerror}); mend that") from error
    except ValueError as error:
        raise _odd_manifest(path, str(error)) from error
    check_format(folder, facts)
    return facts


def check_format(folder: Path, facts: Any) -> None:
    """Refuses a manifest of another format: its keys and rows have other names. What is none passes.

    Raises:
        BadInputError: If it says so, or (format 1) says nothing.
    """
    if not isinstance(facts, dict) or not isinstance(facts.get("config"), dict):
        return
    if (found := facts.get("format", 1)) != FORMAT:
        raise BadInputError(
            f"{folder}: a run folder of format {found}, written by another version of trainer; this one "
            f"reads format {FORMAT}: use that version for it, or give another folder"
        )


def _odd_manifest(path: Path, why: str) -> BadInputError:
    return BadInputError(
        f"{path}: can't be read as a run's manifest ({why}); bring it back, or give another folder"
    )


def read_run(folder: Path) -> RunFolder:
    """Reads a run folder.

    Raises:
        BadInputError: If it isn't one of this trainer.
    """
    facts = read_facts(folder)
    try:
        return RunFolder(folder, facts, Manifest.model_validate(facts))
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise _odd_manifest(folder / MANIFEST, f"{where}: {problem['msg']}") from error


def read_stored(folder: Path) -> Manifest | None:
    """What earlier attempts left in a folder; None if there is no manifest yet.

    Raises:
        BadInputError: As `read_run`.
    """
    try:
        return read_run(folder).manifest
    except _NoManifestError:
        return None


def newest_run(root: Path, recipe: str) -> Path:
    """The newest run folder of a recipe.

    Raises:
        BadInputError: If there is none.
    """
    manifests = [path for path in root.glob(f"*/{MANIFEST}") if _is_of(path, Path(recipe).stem)]
    if not manifests:
        raise BadInputError(f"--resume newest: there is no run of {recipe} under {root}; leave it out")
    return max(manifests, key=lambda path: path.stat().st_mtime).parent


def _is_of(manifest: Path, recipe: str) -> bool:
    """Whether a manifest is of a run of a recipe; a link to a folder, such as runs/latest, is no run."""
    if manifest.parent.is_symlink():
        return False
    try:
        return Path(strict_json.parse(read_inside(manifest, strict_json.LARGEST))["recipe"]).stem == recipe
    except (OSError, ValueError, KeyError, TypeError):
        return False


def has_checkpoint(out: Path | None, newest: bool, recipe: str) -> bool:
    """Whether the run that a command means has a checkpoint, by its name only."""
    try:
        folder = out or (newest_run(RUNS, recipe) if newest else None)
    except (BadInputError, OSError):  # called by a signal's handler: an error there would end in a traceback
        return False
    return folder is not None and any((folder / FOLDER).glob("step-*"))


def read_rows(folder: Path, *kinds: str) -> Iterator[dict[str, Any]]:
    """A run's rows of some kinds, one kind after the other; of all kinds if none is named.

    A line that can't be read is left out: a kill cuts off a last one.
    """
    for kind in kinds or FILES:
        with contextlib.suppress(FileNotFoundError):
            for line in lines_inside(folder / FILES[kind]):
                with contextlib.suppress(ValueError):
                    row = strict_json.parse(line)
                    if isinstance(row, dict):
                        yield row


# --- what is written to it by whoever owns it ---


def set_status(folder: Path, manifest: Mapping[str, Any], status: str, reason: str) -> None:
    """Says in the manifest how the run stands; if the disk is full, say, what happened matters more."""
    try:
        write_json(folder / MANIFEST, {**manifest, **outcome(folder), "status": status, "reason": reason})
    except OSError as error:
        status_in_place(folder, status, error)


def status_in_place(folder: Path, status: str, why: OSError) -> None:
    """Overwrites the status in a manifest where no new file can be written: a full disk takes these bytes.

    The reader must not take the run for one that goes on.
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
        warn(f"{folder / MANIFEST} can't be written ({why.strerror}): it says that the run is running still")


def is_abandoned(folder: Path, facts: Mapping[str, Any]) -> bool:
    """Whether a run whose status is running has ended without a word: no process holds its lock.

    Never true for a run of this process: to close the file would give up its lock.
    """
    if facts.get("status") != "running" or facts.get("pid") == os.getpid():
        return False
    try:
        with os.fdopen(open_inside(folder / _LOCK), "rb") as file:
            asked = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, *_ = struct.unpack("hhqqi", fcntl.fcntl(file, fcntl.F_GETLK, asked))
    except OSError:  # no lock, or a file system without locks: it can't be told
        return False
    return bool(kind == fcntl.F_UNLCK)


def outcome(folder: Path) -> dict[str, Any]:
    """What the manifest says when an attempt is over: when, and the number of anomalies."""
    try:
        anomalies = sum(1 for _ in lines_inside(folder / "anomalies.jsonl"))
    except OSError:
        anomalies = 0
    ended = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return {"ended": ended, "anomalies": anomalies, "rows": hashes_of_rows(folder)}


def write_json(path: Path, value: Any) -> None:
    """Replaces a JSON file in one move, for good when it returns; without the secrets in the value."""
    with written_whole(path) as beside:
        beside.write_text(json.dumps(redact(value), indent=2) + "\n")


# --- whose it is ---


def new_folder(root: Path, recipe_name: str, recipe: Recipe) -> Path:
    """Makes a run folder that nobody else has: <recipe>-<hash8>-<n>.

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
            f"{root}: can't make a run folder there ({_why(root, error)}); give another --out"
        ) from error
    return folder


def _why(folder: Path, error: OSError) -> str:
    """A link to nowhere is "File exists" to mkdir(2)."""
    for path in (folder, *folder.parents):
        with contextlib.suppress(OSError):  # of a folder that can't be searched, the error itself says enough
            if path.is_symlink() and not path.exists():
                return f"{path} is a link to {path.readlink()}, which isn't there"
    return str(error.strerror)


def warn_of_loss(folder: Path) -> None:
    """Says so if a folder for runs goes with the container in which it lies."""
    if read_mount(folder).how == "container layer":
        # A folder that isn't there, the engine makes for root alone.
        warn(
            f"{folder} lies in the container itself and goes with it: mkdir -p {quote(folder.name)} && "
            'docker run -u "$(id -u):$(id -g)" -v "$PWD"/'
            f"{quote(f'{folder.name}:{folder.absolute()}')} keeps it"
        )


def claim_folder(folder: Path) -> bool:
    """Makes sure that a folder the user named can be written and is empty, but for what a killed start left.

    Returns:
        True if it was made by this call.

    Raises:
        BadInputError: If it can't be used.
    """
    try:
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        check_writable(folder)
    except OSError as error:
        raise BadInputError(
            f"--out {folder}: can't be written ({_why(folder, error)}); give another folder"
        ) from error
    if (folder / MANIFEST).exists():
        raise BadInputError(f"--out {folder}: holds a run already; give another folder or remove it")
    if any(not _is_left(path.name) for path in folder.iterdir()):
        raise BadInputError(f"--out {folder}: isn't empty; give a new or an empty folder")
    return made


def _is_left(name: str) -> bool:
    return name in _LEFTOVERS or is_unfinished(name)


def check_inside(folder: Path) -> None:
    """Makes sure that what a run adds to and removes from lies in its folder, which may itself be a link.

    Raises:
        BadInputError: Naming all that doesn't.
    """
    odd = [(name, oddity(folder / name, folder=True)) for name in _FOLDERS]
    files = [*_ADDED_TO, *sorted(path.name for path in folder.glob("*.csv"))]
    odd += [(name, oddity(folder / name, folder=False)) for name in files]
    if said := ", ".join(f"{name} {why}" for name, why in odd if why):
        raise BadInputError(
            f"{folder}: {said}; a run writes only below its own folder: bring that back, or have the whole "
            "run folder elsewhere and link that"
        )


def remove_unused(folder: Path) -> None:
    """Removes a run folder in which no run has begun, nor is about to."""
    with contextlib.suppress(OSError, BadInputError):
        if all(_is_left(path.name) for path in folder.iterdir()):
            file = lock(folder)
            shutil.rmtree(folder)
            os.close(file)


def lock(folder: Path) -> int:
    """Locks a run folder for this process, until the process ends or closes the file that is returned.

    A record lock (fcntl) and not flock: it belongs to the process alone. What the process forked, a loader
    worker say, doesn't keep it a moment longer; and it works across hosts on NFS.

    Raises:
        BadInputError: If another process has it, or the folder can't be written.
    """
    try:
        # Two names for one file are taken: a copy by hard links is another run, whose words stay.
        file = open_own(folder / _LOCK, os.O_RDWR | os.O_CREAT, alone=False)
    except OSError as error:
        raise BadInputError(
            f"--out {folder}: {folder / _LOCK} can't be written ({error.strerror}); mend that, or give "
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
            f"--out {folder}: a run is going on there ({who}); wait for it, stop it, or give another --out"
        ) from error
    if os.fstat(file).st_nlink == 1:
        with contextlib.suppress(OSError):  # a full disk: only the message of another run is the poorer
            os.ftruncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)
    return file
