"""The manifest of a run: its type, and how manifest.json is read, checked and written. Imports no torch."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainer.errors import BadInputError, DivergedError, StopRun
from trainer.host import latest
from trainer.host.files import lines_inside
from trainer.launch.signals import Stopped
from trainer.runs.altered import hashes_of_rows
from trainer.runs.folder import MANIFEST, read_json, status_in_place, write_json

FORMAT = 5  # of a run folder: the names in its manifest and rows, and of the files that hold these


class Device(BaseModel):
    """Device that a run trained on; `gpus` are those of rank 0's host that the job may use."""

    model_config = ConfigDict(strict=True, frozen=True)

    kind: Literal["cpu", "cuda"]
    name: str = ""
    gpus: list[str] = []
    cpu: str | None = None
    cpu_capability: str | None = None


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
    """Pretrained weights that a run started from.

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
    """A run's manifest: what it is, what decides how to go on with it, and what a replay needs.

    What only people read has a default, so that a manifest without it can be read. A manifest changes by
    `update_manifest`, which alone writes it.

    Attributes:
        format: Of the run folder.
        recipe: Its name.
        run_id: Which its checkpoints name, too.
        begun_from: Where it began, if that was another run's checkpoint (`from` in the file).
        config: Its resolved configuration, without secrets.
        config_hash: Of that.
        command: What the user typed for the newest attempt.
        started: When the first attempt did.
        ended: When the newest one did; None while it trains, and if it was killed.
        attempts: All of them, the last one is the newest.
        commit: Of the code, with "+" for uncommitted changes (`dirty`).
        lock: SHA-256 of the wheels.lock of its environment.
        image: Digest of its container's image.
        first_arithmetic: Number of the first attempt's arithmetic (`arithmetic` in the file).
        data: What its task says of the data.
        fingerprint: What its data was, see `trainer.train.components.task.data_of`.
        pretrained: What its weights were at first, where they were somebody's.
        world_size: Number of ranks.
        threads: Intra-op threads per rank; part of the arithmetic on a CPU.
        waiting: Variables by which OpenMP's threads wait for each other, see `trainer.host.startup`.
        steps: At its end.
        trackers: Ids of its runs at trackers, by their names in `log.to`.
        trust: Its own code and whose it is, see `trainer.runs.trust`.
        rows: Hashes of its files of rows, when the newest attempt ended.
        weights: Hashes of the final weights by their files' names.
        anomalies: Number of them.
        out_of_patience: Evaluations in a row that were no better than the best, where these ended it; else 0.
        status: How it ended; running also if it was killed.
        model: The table of the model's parts.
        reason: Why it ended before its end.
        summary: Of a run that came to its end: metrics, seconds and the like.
    """

    model_config = ConfigDict(strict=True, populate_by_name=True, validate_assignment=True)

    format: int = FORMAT
    recipe: str = ""
    run_id: str
    begun_from: BegunFrom | None = Field(None, alias="from")
    config: dict[str, Any]
    config_hash: str
    seed: int | None = None
    command: str = ""
    started: str = ""
    ended: str | None = None
    restarts: int = 0
    attempts: list[Attempt] = Field(min_length=1)
    commit: str | None = None
    dirty: bool | None = None
    lock: str | None = None
    image: str | None = None
    versions: dict[str, Any] = Field(default_factory=dict)
    first_arithmetic: int = Field(1, alias="arithmetic")
    device: Device
    data: dict[str, Any] = Field(default_factory=dict)
    fingerprint: dict[str, str]
    pretrained: Pretrained | None = None
    host: str = ""
    pid: int | None = None
    world_size: int = Field(ge=1, le=1 << 20)
    threads: int = Field(ge=1, le=1 << 16)
    waiting: str = ""
    parameters: dict[str, int] = Field(default_factory=dict)
    steps: int = Field(ge=1)
    gradient_accumulation_steps: int = 1
    notes: list[str] = Field(default_factory=list)
    trackers: dict[str, str] = Field(default_factory=dict)
    trust: dict[str, list[str]] = Field(default_factory=dict)
    rows: dict[str, str] = Field(default_factory=dict)
    weights: dict[str, str]
    anomalies: int = 0
    out_of_patience: int = Field(0, ge=0)
    status: Literal["running", "stopped", "failed", "finished", "diverged"]
    model: dict[str, Any] | None = None
    reason: str | None = None
    summary: Any = None  # which verify judges

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

    def as_facts(self) -> dict[str, Any]:
        """Returns the content of manifest.json; a key that comes later is left out until then."""
        later = {name for name in ("model", "reason", "summary") if getattr(self, name) is None}
        return self.model_dump(by_alias=True, exclude=later)


@dataclass(frozen=True)
class RunFolder:
    """A run folder that was read.

    Attributes:
        path: The folder.
        manifest: What it says.
    """

    path: Path
    manifest: Manifest


class _NoManifestError(BadInputError):
    """Error for a folder without a manifest: nothing was trained there."""


def read_facts(folder: Path) -> dict[str, Any]:
    """A run's manifest as it stands there; only its format is looked at: a report shows odd ones, too.

    Raises:
        BadInputError: If there is none, it can't be read, or another version of trainer wrote it.
    """
    path = folder / MANIFEST
    try:
        facts = read_json(path)
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
        return RunFolder(folder, Manifest.model_validate(facts))
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise _odd_manifest(folder / MANIFEST, f"{where}: {problem['msg']}") from error


def read_stored(folder: Path) -> Manifest | None:
    """Reads the manifest of earlier attempts; None if there is none yet.

    Raises:
        BadInputError: As `read_run`.
    """
    try:
        return read_run(folder).manifest
    except _NoManifestError:
        return None


def status_after(error: BaseException) -> str:
    """Returns the status of a run that an error ended."""
    if isinstance(error, Stopped | StopRun):
        return "stopped"
    return "diverged" if isinstance(error, DivergedError) else "failed"


def update_manifest(folder: Path, manifest: Manifest, **changes: Any) -> None:
    """Changes a run's manifest and writes it; a status comes with the time, and the number of anomalies.

    Raises:
        OSError: If it can't be written; it is changed all the same.
    """
    if "status" in changes:
        try:
            anomalies = sum(1 for _ in lines_inside(folder / "anomalies.jsonl"))
        except OSError:
            anomalies = 0
        ended = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        changes |= {"ended": ended, "anomalies": anomalies, "rows": hashes_of_rows(folder)}
    for name, value in changes.items():
        setattr(manifest, name, value)
    try:
        write_json(folder / MANIFEST, manifest.as_facts())
    except OSError as error:
        if "status" in changes:
            status_in_place(folder, manifest.status, error)
        raise
