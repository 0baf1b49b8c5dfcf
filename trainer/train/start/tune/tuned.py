"""tuned.yaml: settings that `trainer tune` chose for a recipe on a machine, with the measurements."""

import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field

from trainer.config.recipe import Recipe
from trainer.config.redact import redact
from trainer.config.section import Section, validated
from trainer.config.yaml_text import parse_yaml, read_text
from trainer.errors import BadInputError, writing
from trainer.host.files import written_whole
from trainer.runs.differences import FREE, flat

_SHOWN = 3
# Keys that change neither memory nor speed of a step, together with those that may differ on resume.
_FREE = (
    *(key for key in FREE if key != "memory.allocator"),
    "data.micro_batch_size",
    "seed",
    "epochs",
    "max_steps",
    "evaluation.*",
    "hooks.*",
    "data.on_corrupt",
    "data.corrupt_budget",
    "model.pretrained",
    "model.reinit",
    *(
        f"optim.{key}"
        for key in ("lr", "schedule", "warmup_steps", "final_lr", "milestones", "gamma", "decay")
    ),
    *(
        f"optim.{key}"
        for key in ("weight_decay", "decay_1d", "no_decay", "nesterov", "layer_decay", "betas", "eps")
    ),
    "regularization.label_smoothing",
)


class TunedData(Section):
    """Tuned settings of the section `data`; None: not chosen."""

    micro_batch_size: int = Field(..., ge=1, description="data.micro_batch_size")
    workers: int | None = Field(None, ge=0, le=1024, description="data.workers")
    prefetch: int | None = Field(None, ge=1, le=1024, description="data.prefetch")


class TunedSettings(Section):
    """Tuned settings, named as in a recipe."""

    data: TunedData


class Tuned(Section):
    """Contents of tuned.yaml."""

    recipe: str = Field(..., description="name of the recipe")
    differs: dict[str, Any] = Field(
        ..., description="what of it decides memory and speed, where that is not the default"
    )
    ranks: int = Field(..., ge=1, description="ranks that it was tuned for")
    device: Literal["cpu", "cuda"] = Field(..., description="kind of device that it was tuned on")
    settings: TunedSettings
    evidence: dict[str, Any] = Field({}, description="what was measured, and where")


def what_matters(recipe: Recipe) -> dict[str, Any]:
    """Returns values of a recipe that decide memory and speed, by dotted key, without defaults."""
    defaults = flat(Recipe(epochs=1).model_dump(mode="json"))
    values = flat(redact(recipe.model_dump(mode="json")))
    return {
        key: value
        for key, value in values.items()
        if value != defaults.get(key) and not any(fnmatchcase(key, free) for free in _FREE)
    }


def make_tuned(
    recipe: Recipe, name: str, ranks: int, device: Literal["cpu", "cuda"], data: TunedData, evidence: Any
) -> Tuned:
    """Makes the contents of tuned.yaml."""
    return Tuned(
        recipe=name,
        differs=what_matters(recipe),
        ranks=ranks,
        device=device,
        settings=TunedSettings(data=data),
        evidence=evidence,
    )


def write_tuned(path: Path, tuned: Tuned) -> None:
    """Writes tuned.yaml, whole or not at all.

    Raises:
        BadInputError: If the file can't be written.
    """
    head = f"# Written by `trainer tune {tuned.recipe}`, for `trainer train {tuned.recipe} --tuned {path}`.\n"
    text = yaml.safe_dump(tuned.model_dump(mode="json", exclude_none=True), sort_keys=False, width=100)
    with writing(f"--out {path}"), written_whole(path) as file:
        file.write_text(head + text, "utf-8")


def read_tuned(path: Path) -> Tuned:
    """Reads tuned.yaml.

    Raises:
        BadInputError: If the file can't be read, or isn't from `trainer tune`.
    """
    shown = f"--tuned {path}"
    text = read_text(path, shown, "from `trainer tune`", "`trainer tune RECIPE` writes one")
    values = parse_yaml(text, shown)
    if not isinstance(values, dict):
        raise BadInputError(f"{shown}: isn't from `trainer tune`, which writes a mapping")
    return validated(Tuned, values, shown)


def with_tuned(path: Path | None, settings: Sequence[str]) -> list[str]:
    """Returns all settings of a command: those of tuned.yaml first, so that --set overrides them.

    Raises:
        BadInputError: As `read_tuned`.
    """
    return [*(settings_of(read_tuned(path)) if path is not None else ()), *settings]


def settings_of(tuned: Tuned) -> list[str]:
    """Returns the tuned settings as arguments of --set."""
    chosen = tuned.settings.data.model_dump(exclude_none=True)
    return [f"data.{key}={value}" for key, value in chosen.items()]


def check_tuned(tuned: Tuned, path: Path, recipe: Recipe, ranks: int, device: str) -> None:
    """Checks that tuned.yaml is for this recipe, number of ranks and kind of device.

    Raises:
        BadInputError: If it is for another.
    """
    again = "tune it again with trainer tune"
    there, here = (
        {key: json.dumps(value) for key, value in side.items()}
        for side in (tuned.differs, what_matters(recipe))
    )
    default = "the default"
    odd = [
        f"{key}: {there.get(key, default)}, now {here.get(key, default)}"
        for key in sorted(there.keys() | here.keys())
        if there.get(key) != here.get(key)
    ]
    if odd:
        what = odd[:_SHOWN]
        more = f" and {len(odd) - _SHOWN} more" if len(odd) > _SHOWN else ""
        raise BadInputError(
            f"--tuned {path}: was made for another recipe, {tuned.recipe} ({'; '.join(what)}{more}); {again}"
        )
    if tuned.ranks != ranks:
        raise BadInputError(
            f"--tuned {path}: was made for {tuned.ranks} rank{'s' * (tuned.ranks > 1)}, not for {ranks}; "
            f"{again}"
        )
    if tuned.device != device:
        raise BadInputError(f"--tuned {path}: was made on {tuned.device}, and this is {device}; {again}")
