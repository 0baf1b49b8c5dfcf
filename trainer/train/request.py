"""Request to the ranks: made by the command, read by each rank."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from trainer.config.recipe import Recipe
from trainer.config.redact import redact_words
from trainer.observe.profile import ProfileKind
from trainer.runs.manifest import BegunFrom, Pretrained
from trainer.train.options import Mode


def typed(argv: Sequence[str]) -> str:
    """A command as it was typed, without secrets."""
    return shlex.join(redact_words(["trainer", *argv[1:]]))


@dataclass(frozen=True)
class Request:
    """One start of a run, the same for each of its ranks.

    Attributes:
        recipe: The validated configuration; where the launcher chooses for `auto`, its number, and for a
            branch of the hub its commit.
        name: Of the recipe.
        folder: The run folder; rank 0 writes to it. If it holds a run, that is resumed.
        resume: Whether a changed configuration may go on.
        stop_after: The step after which to stop with a checkpoint, or None.
        profile: Whether to look at some steps, and how.
        command: What the user typed, without secrets.
        begun_from: The other run's checkpoint that a new run begins from, or None.
        pretrained: What `model.pretrained` is.
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


def as_json(request: Request) -> dict[str, Any]:
    """A request for the ranks of a launch."""
    values: dict[str, Any] = TypeAdapter(Request).dump_python(request, mode="json")
    return values


def from_json(values: Mapping[str, Any]) -> Request:
    """Reads what `as_json` wrote."""
    return TypeAdapter(Request).validate_python(values)
