"""What a start asks for, and what rank 0 made of it. Imports no torch."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter

from trainer.config.recipe import Recipe
from trainer.config.redact import redact_text
from trainer.runs.folder import RUNS
from trainer.runs.manifest import BegunFrom, Manifest, Pretrained
from trainer.train.options import Mode, StartingPoint, TrainOptions

_T = TypeVar("_T")


def typed(argv: Sequence[str]) -> str:
    """Returns a command as it was typed, without secrets: of `trainer`, or of a script that calls `fit`."""
    program = Path(argv[0]).name
    if program.startswith("ipykernel"):
        return "fit(...) in a notebook"
    words = ["trainer"] if program in ("trainer", "__main__.py") else ["python", argv[0] or "-"]
    return shlex.join(map(redact_text, [*words, *argv[1:]]))


@dataclass(frozen=True)
class Request:
    """Request to start or resume a run, equal for all its ranks.

    Attributes:
        recipe: The validated configuration.
        name: Name of the recipe.
        folder: The run folder; None for a new one below `runs`.
        resume: The flag --resume: what may differ from the run in the folder.
        stop_after: The step after which to stop with a checkpoint, or None.
        profile: Kind of profile of some steps, or None.
        command: The command as it was typed, without secrets.
        source: The checkpoint that --init-from names, or None.
        settings: Settings KEY=VALUE as they were typed.
        runs: The folder of all runs.
        gpus: Number of GPUs on this host by the launcher's count; None: nobody has counted.
        again: True if an earlier attempt of this job has made or taken the run folder.
        made: True if this job has made the run folder: it is removed if no run begins in it.
        marker: File that keeps the path of a new run folder for restarts by torchrun, or None.
    """

    recipe: Recipe
    name: str
    folder: Path | None = None
    resume: Mode = "auto"
    stop_after: int | None = None
    profile: Literal["torch", "nvtx"] | None = None
    command: str = field(default_factory=lambda: typed(sys.argv))
    source: StartingPoint | None = None
    settings: list[str] = field(default_factory=list)
    runs: Path = RUNS
    gpus: int | None = None
    again: bool = False
    made: bool = False
    marker: Path | None = None


@dataclass(frozen=True)
class PreparedRun:
    """Run that may be trained, as rank 0 has prepared it for all ranks.

    Attributes:
        recipe: The configuration, with a commit in place of a branch of the hub.
        name: Name of the recipe.
        folder: The run folder; rank 0 writes to it.
        resume: The flag --resume.
        stop_after: The step after which to stop with a checkpoint, or None.
        profile: Kind of profile of some steps, or None.
        command: The command as it was typed, without secrets.
        stored: The manifest of the run that is resumed; None for a new one.
        begun_from: Checkpoint of another run that a new run begins from, or None.
        pretrained: Source and hash of the pretrained weights, or None.
        tried: Results of the trial of a custom task, see `trainer.tasks.custom_trial.try_task`.
        made: True if this attempt has made the run folder.
        ended: Why nothing is trained and the exit code, or None.
    """

    recipe: Recipe
    name: str
    folder: Path
    resume: Mode = "auto"
    stop_after: int | None = None
    profile: Literal["torch", "nvtx"] | None = None
    command: str = ""
    stored: Manifest | None = None
    begun_from: BegunFrom | None = None
    pretrained: Pretrained | None = None
    tried: dict[str, str] = field(default_factory=dict)
    made: bool = False
    ended: tuple[str, int] | None = None


def request_of(options: TrainOptions, recipe: Recipe, **more: Any) -> Request:
    """Returns the request of the flags of `trainer train`."""
    given = {
        "resume": options.resume,
        "source": options.source,
        "settings": options.set,
        "stop_after": options.stop_after,
        "profile": options.profile,
    }
    return Request(recipe, options.recipe, **{**given, **more})


def as_json(value: Request | PreparedRun) -> dict[str, Any]:
    """Returns JSON values, for another process."""
    values: dict[str, Any] = TypeAdapter(type(value)).dump_python(value, mode="json")
    return values


def from_json(kind: type[_T], values: Mapping[str, Any]) -> _T:
    """Reads the values of `as_json`."""
    return TypeAdapter(kind).validate_python(values)
