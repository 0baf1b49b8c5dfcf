"""Manifest of a run: its type, and reading, checking and writing of manifest.json. Imports no torch."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, field_validator

from trainer.config.dropped import without_dropped
from trainer.config.recipe import Recipe
from trainer.errors import BadInputError, DivergedError, StopRun
from trainer.host import latest
from trainer.host.files import lines_inside
from trainer.launch.signals import Stopped
from trainer.runs.altered import hashes_of_rows
from trainer.runs.folder import MANIFEST, read_json, status_in_place, write_json

FORMAT = 6  # of a run folder: the keys of its manifest and records, and the names of the files
_OF_0_1 = 5  # format of runs of trainer 0.1, which are read, but not gone on with

_SECTIONS = [name for name, value in Recipe(epochs=1).model_dump().items() if isinstance(value, dict)]


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
        started: Time of the start.
        step: Steps done before it.
        ranks: Number of ranks.
        threads: Intra-op threads per rank.
        log_every: Steps between its metrics records; a record's loss is their mean.
        changed: Changes to the configuration, by `--resume force` or a later end, each as "key: before, now
            after".
        extends: True if it trained beyond an end that the run had reached, or resumed such an extension.
        config_hash: Hash of its configuration.
        jsonl: True if it wrote metrics.jsonl and the files beside it.
        checksums: True if it wrote checksums.jsonl.
        arithmetic: Version of its arithmetic, see `trainer.version`; 1 if the key is missing.
        job: Job of the cluster that started it: its number, restarts and nodes; empty elsewhere.
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
    """Checkpoint of another run that a run began from.

    Attributes:
        folder: Run folder of the other run at that time.
        run_id: Id of the other run.
        step: Step of the checkpoint.
        hash: SHA-256 of its SHA256SUMS, and so of all its files.
        differs: Differences in configuration and data, each as "key: there, now here".
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
        source: `model.pretrained` of the configuration.
        revision: Commit on the hub, or file name of torchvision's weights; None for a path.
        sha256: SHA-256 of the safetensors file.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    source: str
    revision: str | None
    sha256: str


class TaskIdentity(BaseModel):
    """Identity of a custom task, see `trainer.tasks.identity`; and the results of its trial.

    Attributes:
        compiler: Version of Python's compiler.
        code: Digests of code, by name.
        values: Values, or their digests, by name.
        unknown: Names of values that aren't compared.
        tried: Results of the trial, and their environment, see `trainer.tasks.custom_trial.try_task`.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    compiler: str
    code: dict[str, str]
    values: dict[str, str]
    unknown: list[str] = []
    tried: dict[str, str] = {}


class Manifest(BaseModel):
    """Manifest of a run: its provenance, and the facts by which it is resumed, replayed and verified.

    Facts that only people read have defaults, so that a manifest without them can be read. Only
    `update_manifest` changes and writes a manifest.

    Attributes:
        format: Format of the run folder.
        recipe: Name of the recipe.
        run_id: Id of the run, also in its checkpoints.
        begun_from: Checkpoint of another run that it began from (`from` in the file).
        config: Resolved configuration, without secrets.
        redacted: Salted hash of each value of `config` that was redacted, by key.
        config_hash: Hash of `config`.
        command: Command line of the newest attempt.
        started: Start of the first attempt.
        ended: End of the newest attempt; None while it trains, and if it was killed.
        attempts: Attempts, the newest last.
        commit: Commit of the code, with "+" for uncommitted changes (`dirty`).
        lock: SHA-256 of the wheels.lock of its environment.
        image: Digest of its container's image.
        first_arithmetic: Version of the first attempt's arithmetic (`arithmetic` in the file).
        data: Description of the data by the task.
        fingerprint: Fingerprint of the data, see `trainer.train.components.task.data_of`.
        identity: Identity of a custom task; None for other tasks, and of runs from before it was recorded.
        pretrained: Pretrained weights that it started from.
        world_size: Number of ranks.
        threads: Intra-op threads per rank; part of the arithmetic on a CPU.
        waiting: Environment variables for the waiting of OpenMP's threads, see `trainer.host.startup`.
        metric: The deciding metric, which is better where it is lower if `lower_is_better`; "" in older ones.
        planned_steps: Steps of the whole run by its configuration; `steps` in older manifests, which have the
            steps that were done there once the run has ended.
        steps_done: Steps done at the end of the newest attempt; None while it trains, and if it was killed.
        trackers: Ids of its runs at trackers, by their names in `log.to`.
        rows: "SHA-256 SIZE" of the records files at the end of the newest attempt.
        weights: Hashes of the final weights by file name.
        anomalies: Number of anomalies.
        out_of_patience: Evaluations in a row without improvement, where early stopping ended it; else 0.
        finished_by_hook: True if a hook ended the run by `Finish`: a replay calls none.
        status: Status; "running" also if it was killed.
        model: Table of the model's parts.
        reason: Reason of an early end.
        summary: Metrics, seconds and the like of a run that finished.
    """

    model_config = ConfigDict(strict=True, populate_by_name=True, validate_assignment=True)

    format: int = FORMAT
    recipe: str = ""
    run_id: str
    begun_from: BegunFrom | None = Field(None, alias="from")
    config: dict[str, Any]
    redacted: dict[str, str] = Field(default_factory=dict)
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
    identity: TaskIdentity | None = None
    pretrained: Pretrained | None = None
    host: str = ""
    pid: int | None = None
    world_size: int = Field(ge=1, le=1 << 20)
    threads: int = Field(ge=1, le=1 << 16)
    waiting: str = ""
    parameters: dict[str, int] = Field(default_factory=dict)
    metric: str = ""
    lower_is_better: bool = False
    planned_steps: int = Field(ge=1, validation_alias=AliasChoices("planned_steps", "steps"))
    steps_done: int | None = Field(None, ge=0)
    gradient_accumulation_steps: int = 1
    notes: list[str] = Field(default_factory=list)
    trackers: dict[str, str] = Field(default_factory=dict)
    rows: dict[str, str] = Field(default_factory=dict)
    weights: dict[str, str]
    anomalies: int = 0
    out_of_patience: int = Field(0, ge=0)
    finished_by_hook: bool = False
    status: Literal["running", "stopped", "failed", "finished", "diverged"]
    model: dict[str, Any] | None = None
    reason: str | None = None
    summary: Any = None  # checked by verify

    @field_validator("config")
    @classmethod
    def _has_sections(cls, config: dict[str, Any]) -> dict[str, Any]:
        if odd := [name for name in _SECTIONS if not isinstance(config.get(name, {}), dict)]:
            raise ValueError(f"{odd[0]} isn't a section")
        return without_dropped(config)

    @property
    def arithmetic(self) -> int:
        """Version of the newest attempt's arithmetic."""
        return self.attempts[-1].arithmetic

    @property
    def extended(self) -> bool:
        """True if it was ever extended after it had finished."""
        return any(attempt.extends for attempt in self.attempts)

    @property
    def last_step(self) -> int:
        """Step at which the run ended, if it has final weights; else the planned one."""
        return self.steps_done if self.weights and self.steps_done else self.planned_steps

    def foreign(self, state: Mapping[str, Any]) -> str | None:
        """Returns the reason why a checkpoint with this state isn't one of this run, or None."""
        if (run_id := state.get("run_id")) != self.run_id:
            return f"it is of another run ({str(run_id)[:8]}; this one is {self.run_id[:8]})"
        if state.get("config_hash") not in [one.config_hash for one in self.attempts]:
            return "its configuration is none that this run was trained with"
        return None

    def as_facts(self) -> dict[str, Any]:
        """Returns the content of manifest.json; keys without a value yet are left out."""
        later = {name for name in ("identity", "model", "reason", "summary") if getattr(self, name) is None}
        return self.model_dump(by_alias=True, exclude=later)


@dataclass(frozen=True)
class RunFolder:
    """Run folder that was read.

    Attributes:
        path: The folder.
        manifest: Its manifest.
    """

    path: Path
    manifest: Manifest


class _NoManifestError(BadInputError):
    """Error for a folder without a manifest: nothing was trained there."""


def read_facts(folder: Path) -> dict[str, Any]:
    """Returns a run's manifest as plain JSON. Only its format is checked, as reports show odd ones, too.

    Raises:
        BadInputError: If it is missing or unreadable, or has another format.
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
    """Refuses a manifest of another format: its keys and records have other names. Other values pass.

    Raises:
        BadInputError: If `format` is another number, or is missing (format 1).
    """
    if not isinstance(facts, dict) or not isinstance(facts.get("config"), dict):
        return
    if (found := facts.get("format", 1)) not in (_OF_0_1, FORMAT):
        raise BadInputError(
            f"{folder}: a run folder of format {found}, written by another version of trainer; this one "
            f"reads formats {_OF_0_1} and {FORMAT}: use that version for it, or give another folder"
        )


def check_current(folder: Path, manifest: Manifest) -> None:
    """Refuses a run of trainer 0.1, where steps of it are to be trained.

    Raises:
        BadInputError: If it is one.
    """
    if manifest.format != FORMAT:
        raise BadInputError(
            f"{folder}: a run of trainer 0.1, which this version evaluates, exports and reports, but doesn't "
            f"train on; use trainer 0.1 for that, or begin a new run from its weights by --init-from {folder}"
        )


def _odd_manifest(path: Path, why: str) -> BadInputError:
    return BadInputError(
        f"{path}: can't be read as a run's manifest ({why}); bring it back, or give another folder"
    )


def planned_steps(facts: Mapping[str, Any]) -> int | None:
    """Returns the planned steps of a manifest as plain JSON, older ones included; None without a number."""
    steps = facts.get("planned_steps", facts.get("steps"))
    return steps if type(steps) is int else None


def read_run(folder: Path) -> RunFolder:
    """Reads a run folder.

    Raises:
        BadInputError: If its manifest is missing or malformed, or has another format.
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
    """Changes a run's manifest and writes it; with a status also time, anomalies and hashes of records.

    Raises:
        OSError: If it can't be written; the object is changed all the same.
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
