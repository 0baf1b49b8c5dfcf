"""Whether a run goes on where one stopped: what may differ, and what a run folder says about it."""

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from trainer import checkpoint
from trainer.config.redact import redact
from trainer.errors import EXIT_DONE, EXIT_FAILED, BadInputError
from trainer.host import strict_json

FORMAT = 2  # of a run folder: the names in its manifest and rows
RUNS = Path("runs")

# What changes nothing that is computed: where data lies and how it comes, and what is written of a run.
# (The order that data.cache_limit leads to is compared with the data.)
FREE = (
    "about",
    "data.path",
    "data.cache",
    "data.cache_limit",
    "data.check",
    "data.workers",
    "data.prefetch",
    "data.resident",
    "data.start_method",
    "parallel.timeout_s",
    "memory.allocator",
    "memory.empty_cache",
    "memory.history",
    "anomaly.spike*",
    "anomaly.most",
    "parallel.hang_s",
    "parallel.cpu_binding",
    "log.*",
    "checkpoint.*",
)
_SHOWN = 4

Mode = Literal["auto", "newest", "force", "never"]


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
        changed: What of the configuration `--resume force` changed: "key: before, now after".
        config_hash: Of its configuration.
        jsonl: Whether it wrote rows to metrics.jsonl.
        checksums: Whether it wrote rows to checksums.jsonl.
        job: Of the cluster that started it: its number, restarts and nodes; empty elsewhere.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    started: str
    step: int = Field(ge=0)
    ranks: int = Field(ge=1)
    threads: int = Field(ge=1)
    log_every: int = Field(ge=1)
    changed: list[str]
    config_hash: str = ""
    jsonl: bool = True
    checksums: bool = True
    job: dict[str, str] = {}


class Stored(BaseModel):
    """What an earlier attempt left in a run folder: of its manifest, what decides how to go on.

    Attributes:
        config: Its resolved configuration.
        threads: Intra-op threads per rank; part of the arithmetic on a CPU.
        device: Its kind: part of the arithmetic, too.
        world_size: Number of ranks.
        status: How it ended; running also if it was killed.
        fingerprint: What its data was, see `trainer.train.run.data_of`.
        attempts: All of them, the last one is the newest.
        run_id: Which its checkpoints name, too; an older trainer gave none.
        steps: At its end.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    config: dict[str, Any]
    threads: int = Field(ge=1, le=1 << 16)
    device: _Device
    world_size: int = Field(ge=1, le=1 << 20)
    status: Literal["running", "stopped", "failed", "finished", "diverged"]
    fingerprint: dict[str, str] = {}
    attempts: list[Attempt] = []
    run_id: str = ""
    steps: int = Field(0, ge=0)

    def foreign(self, state: Mapping[str, Any]) -> str | None:
        """Why a checkpoint with this state isn't one of this run, or None."""
        run_id = state.get("run_id")
        if not run_id:
            return "it names no run: an older trainer wrote it, so that nothing tells whose it is"
        if run_id != self.run_id:
            return f"it is of another run ({str(run_id)[:8]}; this one is {self.run_id[:8] or 'unnamed'})"
        if state.get("config_hash") not in {one.config_hash for one in self.attempts}:
            return "its configuration is none that this run was trained with"
        return None


def check_format(folder: Path, manifest: object) -> None:
    """Refuses a run folder of another format: its keys and rows have other names.

    Raises:
        BadInputError: If it says so, or (format 1) says nothing.
    """
    if not isinstance(manifest, dict) or not isinstance(manifest.get("config"), dict):
        return  # no manifest at all, which the caller sees
    if (found := manifest.get("format", 1)) != FORMAT:
        raise BadInputError(
            f"{folder}: a run folder of format {found}, written by another version of trainer; this one "
            f"reads format {FORMAT}: use that version for it, or give another folder"
        )


def read_stored(folder: Path) -> Stored | None:
    """Reads a run folder's manifest; None if there is none.

    Raises:
        BadInputError: If it isn't a manifest of this trainer.
    """
    path = folder / "manifest.json"
    try:
        manifest = strict_json.parse(path.read_bytes())
        check_format(folder, manifest)
        return Stored.model_validate(manifest)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # pydantic's, too
        what = f" ({error.strerror})" if isinstance(error, OSError) else ""
        raise BadInputError(f"{path} can't be read as a run's manifest{what}; give another --out") from error


def newest_run(root: Path, recipe: str) -> Path:
    """The newest run folder of a recipe.

    Raises:
        BadInputError: If there is none.
    """
    folders = [path.parent for path in root.glob(f"{Path(recipe).stem}-*/manifest.json")]
    if not folders:
        raise BadInputError(f"--resume newest: there is no run of {recipe} under {root}; leave it out")
    return max(folders, key=lambda folder: (folder / "manifest.json").stat().st_mtime)


def has_checkpoint(out: Path | None, mode: Mode, recipe: str) -> bool:
    """Whether the run that a command means has a checkpoint, by its name only."""
    try:
        folder = out or (newest_run(RUNS, recipe) if mode == "newest" else None)
    except (BadInputError, OSError):  # called by a signal's handler: an error there would end in a traceback
        return False
    return folder is not None and any((folder / checkpoint.FOLDER).glob("step-*"))


def differences(stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Keys of two configurations whose values differ and matter, each as "key: before, now after"."""
    before, after = flat(stored), flat(now)
    return [
        f"{key}: {json.dumps(before.get(key))}, now {json.dumps(after.get(key))}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not any(fnmatchcase(key, free) for free in FREE)
        # Where somebody's file lies is free: what is in it is compared with the data.
        if key != "task" or not all(str(one.get(key)).endswith(".py") for one in (before, after))
        # Only skipping is a part of the arithmetic.
        if key != "anomaly.nonfinite" or "skip" in (before.get(key), after.get(key))
    ]


def check_resumable(
    folder: Path, stored: Stored, config: Mapping[str, Any], device: str, data: Mapping[str, str], mode: Mode
) -> None:
    """Makes sure that a folder's run may be gone on with by this configuration, on this device and data.

    Args:
        folder: The run folder.
        stored: What it holds.
        config: The resolved configuration.
        device: cpu or cuda.
        data: From `trainer.train.run.data_of`.
        mode: What the user allows.

    Raises:
        BadInputError: If the user forbade it, or something differs and that wasn't forced.
    """
    if mode == "never":
        raise BadInputError(f"--out {folder}: holds a run already; give another folder or remove it")
    differing = differences(stored.config, redact(config))
    if stored.device.kind != device:
        differing.append(f"trained on {stored.device.kind}, now {device}")
    differing += [
        f"{name}: {before}, now {data.get(name)}"
        for name, before in stored.fingerprint.items()
        if before != data.get(name)
    ]
    if differing and mode != "force":
        more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        raise BadInputError(
            f"--out {folder}: holds a run with another configuration ({'; '.join(differing[:_SHOWN])}{more});"
            " give another --out, or go on with the changed one by --resume force"
        )


def ended(folder: Path, stored: Stored, mode: Mode, steps: int) -> tuple[str, int] | None:
    """What to say of a run that is through, and the exit code; None if it can be gone on with.

    Args:
        folder: The run folder.
        stored: What it holds.
        mode: What the user allows.
        steps: At which it is to end now: by force it is extended.
    """
    if stored.status == "finished" and not (mode == "force" and steps > stored.steps):
        return f"{folder} is finished already; nothing to do", EXIT_DONE
    if stored.status == "diverged" and mode != "force":
        remedy = "go on from its newest checkpoint, with what you changed, by --resume force"
        return f"{folder} is diverged already; {remedy}", EXIT_FAILED
    return None


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A configuration's values by dotted key."""
    keys: dict[str, Any] = {}
    for name, value in config.items():
        keys |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return keys
