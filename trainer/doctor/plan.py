"""What of a recipe the box must bear; read without torch, which takes longer than all the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from trainer.config import Section, override, read_recipe, recipe_names, validated
from trainer.doctor.facts import Gpus, Plan
from trainer.errors import BadInputError
from trainer.limits import Limits, workers_per_rank

_IN_MEMORY = ("digits", "synthetic")


class _Data(Section):
    model_config = ConfigDict(extra="ignore")
    name: str = "digits"
    path: str | None = None
    cache: str | None = None
    workers: Annotated[int, Field(ge=0, le=1024)] | Literal["auto"] = "auto"
    prefetch: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = 4
    micro_batch: Annotated[int, Field(ge=1)] | Literal["auto"] = 64
    image_size: int = Field(224, ge=8, le=4096)


class _Compile(Section):
    model_config = ConfigDict(extra="ignore")
    mode: str = "none"


class Read(Section):
    """The keys that the doctor looks at, with the defaults of `trainer.recipe.Recipe`."""

    model_config = ConfigDict(extra="ignore")
    device: str = "auto"
    data: _Data = _Data()
    compile: _Compile = _Compile()


_KNOWN = {"device", "compile.mode", *(f"data.{name}" for name in _Data.model_fields)}


def read_keys(recipe: str | None, settings: Sequence[str]) -> Read:
    """Reads a recipe, and checks what was set as `trainer train` would.

    Keys that the doctor doesn't know are for the whole configuration to judge, which imports torch; with a
    recipe of the package and keys that it does know that isn't needed.

    Raises:
        BadInputError: For the first thing that is wrong.
    """
    if recipe is None:
        if settings:
            raise BadInputError(f"--set {settings[0]}: name a recipe, such as trainer doctor digits --set …")
        return Read()
    values = override(read_recipe(recipe), settings)
    given = override({}, settings) if recipe in recipe_names() else values
    if set(_dotted(given)) - _KNOWN or "data.name" in _dotted(given):
        _check_all(recipe, settings)
    return validated(Read, values, recipe)


def _check_all(recipe: str, settings: Sequence[str]) -> None:
    try:
        from trainer.start import load_recipe
    except Exception:  # a torch that can't be imported is what the doctor is asked about
        return
    load_recipe(recipe, list(settings))


def _dotted(values: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{before}{name}.")
        else:
            yield f"{before}{name}"


def make_plan(recipe: str | None, read: Read, limits: Limits, gpus: Gpus) -> Plan:
    """What a run of it would want here.

    Args:
        recipe: Its name.
        read: What it says.
        limits: Of the container.
        gpus: Which give the number of ranks.
    """
    ranks = max(1, len(gpus.cards)) if read.device != "cpu" else 1
    if recipe is None:
        return Plan(ranks=ranks)
    data = read.data
    files = data.name not in _IN_MEMORY
    workers = data.workers if data.workers != "auto" else workers_per_rank(limits, ranks) if files else 0
    batch = data.micro_batch if data.micro_batch != "auto" else 64
    return Plan(
        recipe=recipe,
        workers=workers,
        prefetch=data.prefetch if data.prefetch != "auto" else 4,
        batch_bytes=batch * 3 * data.image_size**2 if files else 0,
        compiles=read.compile.mode != "none",
        ranks=ranks,
    )
