"""Request to train, made by the launcher and read by each rank."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from trainer.config.recipe import Recipe
from trainer.config.redact import redact_text
from trainer.observe.profile import ProfileKind
from trainer.runs.manifest import BegunFrom, Pretrained
from trainer.train.options import Mode


def typed(argv: Sequence[str]) -> str:
    """Returns a command as it was typed, without secrets."""
    return shlex.join(map(redact_text, ["trainer", *argv[1:]]))


@dataclass(frozen=True)
class Request:
    """Request to start or resume a run, equal for all its ranks.

    Attributes:
        recipe: The validated configuration, with the launcher's choices in place of `auto`, and a commit in
            place of a branch of the hub.
        name: Name of the recipe.
        folder: The run folder; rank 0 writes to it. If it holds a run, that is resumed.
        resume: The flag --resume: what may differ from the run in the folder.
        stop_after: The step after which to stop with a checkpoint, or None.
        profile: Kind of profile of some steps, or None.
        command: The command as it was typed, without secrets.
        begun_from: Checkpoint of another run that a new run begins from, or None.
        pretrained: Source and hash of the pretrained weights, or None.
        tried: Results of the trial of a custom task, see `trainer.tasks.custom_trial.try_task`.
    """

    recipe: Recipe
    name: str
    folder: Path
    resume: Mode = "auto"
    stop_after: int | None = None
    profile: ProfileKind | None = None
    command: str = field(default_factory=lambda: typed(sys.argv))
    begun_from: BegunFrom | None = None
    pretrained: Pretrained | None = None
    tried: dict[str, str] = field(default_factory=dict)


def as_json(request: Request) -> dict[str, Any]:
    """Returns a request as JSON values, for the ranks of a launch."""
    values: dict[str, Any] = TypeAdapter(Request).dump_python(request, mode="json")
    return values


def from_json(values: Mapping[str, Any]) -> Request:
    """Reads a request from the values of `as_json`."""
    return TypeAdapter(Request).validate_python(values)
