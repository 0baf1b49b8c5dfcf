"""What of a recipe the box must bear; read without torch, which takes longer than all the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from trainer.commands.doctor.facts import Gpus, Plan
from trainer.config.recipe_file import Section, override, read_recipe, validated
from trainer.data.fit import Sizes, by_rule, bytes_needed
from trainer.data.kinds import WITHOUT_WORKERS, Kind
from trainer.host.limits import Limits

_USUAL_BATCH = 64


class _Data(Section):
    model_config = ConfigDict(extra="ignore")
    name: Kind = "digits"
    path: str | None = None
    cache: str | None = None
    workers: Annotated[int, Field(ge=0, le=1024)] | Literal["auto"] = "auto"
    prefetch: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = "auto"
    micro_batch: Annotated[int, Field(ge=1)] | Literal["auto"] = 64
    evaluation_batch: int = Field(256, ge=1)
    image_size: int = Field(224, ge=8, le=4096)


class _Compile(Section):
    model_config = ConfigDict(extra="ignore")
    mode: str = "none"


class Read(Section):
    """The keys that the doctor looks at, with the defaults of `trainer.config.recipe.Recipe`."""

    model_config = ConfigDict(extra="ignore")
    device: str = "auto"
    data: _Data = _Data()
    compile: _Compile = _Compile()


_KNOWN = {"device", "compile.mode", *(f"data.{name}" for name in _Data.model_fields)}


def read_keys(recipe: str, settings: Sequence[str]) -> Read:
    """Reads a recipe, and checks the keys that the doctor looks at as `trainer train` would.

    Other keys of a recipe are left to that. What else was set is judged by the whole configuration, which
    imports torch.

    Raises:
        BadInputError: For the first thing that is wrong.
    """
    values = override(read_recipe(recipe), settings)
    if set(_dotted(override({}, settings))) - _KNOWN:
        _check_all(recipe, settings)
    return validated(Read, values, recipe)


def _check_all(recipe: str, settings: Sequence[str]) -> None:
    try:
        from trainer.train.start import load_recipe
    except Exception:  # a torch that can't be imported is what the doctor is asked about
        return
    load_recipe(recipe, list(settings))


def _dotted(values: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{before}{name}.")
        else:
            yield f"{before}{name}"


def make_plan(recipe: str, read: Read, limits: Limits, gpus: Gpus) -> Plan:
    """What a run of it would want here.

    Args:
        recipe: Its name.
        read: What it says.
        limits: Of the container.
        gpus: Which give the number of ranks.
    """
    ranks = max(1, len(gpus.cards)) if read.device != "cpu" else 1
    data, compiles = read.data, read.compile.mode != "none"
    if data.name in WITHOUT_WORKERS:
        return Plan(recipe=recipe, compiles=compiles, ranks=ranks)
    sample = 3 * data.image_size**2  # uint8, as it lies in the ring
    batch = _USUAL_BATCH if data.micro_batch == "auto" else data.micro_batch
    sizes = Sizes(sample, sample * batch, sample * data.evaluation_batch)
    chosen = by_rule(data.workers, data.prefetch, sizes, limits, ranks)
    return Plan(
        recipe=recipe,
        workers=chosen.workers,
        prefetch=chosen.prefetch,
        batch_bytes=sizes.batch,
        loader_bytes=ranks * bytes_needed(chosen, sizes),
        compiles=compiles,
        ranks=ranks,
    )
