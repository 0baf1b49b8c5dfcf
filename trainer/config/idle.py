"""Keys that were typed and have no effect, as another choice stands: derived from the schema and its tables.

A description whose parenthesis names values of another key of its section, "(fp16)", says that the key is
read with these alone; "(but digits)", with all others.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel

from trainer.config.models import MODELS
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import override
from trainer.config.task_file import OWN_EPOCHS, OWN_LR, OWN_STEPS
from trainer.config.tasks import CUSTOM, TASKS

_WORDS = re.compile(r"\((but )?([\w-]+(?:, [\w-]+)*)\)")


class Condition(NamedTuple):
    """Key of the section that decides whether another is read: with `values`, or with all but these."""

    choice: str
    values: tuple[str, ...]
    but: bool = False


def typed_keys(settings: Sequence[str]) -> set[str]:
    """Returns the keys that settings such as "optim.lr=0.1" or "optim={lr: 0.1}" set."""
    return set(_leaves(override({}, settings)))


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


@cache
def condition(section: type[BaseModel], key: str) -> Condition | None:
    """Returns the condition under which a key of a section has an effect, from its description."""
    choices = {
        name: values for name in section.model_fields if name != key and (values := _values(section, name))
    }
    for but, words in _WORDS.findall(section.model_fields[key].description or ""):
        named = tuple(words.split(", "))
        for choice, values in choices.items():
            if set(named) <= values:
                return Condition(choice, named, bool(but))
    return None


def _values(section: type[BaseModel], name: str) -> set[str]:
    kind = section.model_fields[name].annotation
    if section is Recipe.model_fields["model"].annotation and name == "name":
        return set(MODELS)
    return {str(value) for value in get_args(kind)} if get_origin(kind) is Literal else set()


def idle_keys(recipe: Recipe, typed: set[str]) -> Iterator[str]:
    """Yields a line for each typed key that isn't read, with the choice that makes it idle."""
    config = recipe.model_dump()
    yield from (f"{key} has no effect{why}" for key in sorted(typed) if (why := _why_idle(config, key)))


def is_read(config: Mapping[str, Any], dotted: str) -> bool:
    """True if a run of this configuration, as plain values, reads a key."""
    task = TASKS.get(str(config.get("task")), CUSTOM)
    others = {kind.section for kind in TASKS.values()} - {task.section}
    return (
        dotted.partition(".")[0] not in others and dotted not in task.unread and not _why_idle(config, dotted)
    )


def _why_idle(config: Mapping[str, Any], dotted: str) -> str:
    """Returns the reason why a key has no effect; "" if it has."""
    if dotted in TASKS.get(str(config.get("task")), CUSTOM).ignores:
        return f": task={config.get('task')} doesn't read it"
    name, _, key = dotted.partition(".")
    section, values = Recipe.model_fields.get(name), config.get(name)
    kind = section.annotation if section else None
    if not (isinstance(kind, type) and issubclass(kind, BaseModel) and isinstance(values, Mapping)):
        return ""
    found = condition(kind, key) if key in kind.model_fields else None
    if found is None or (str(value := values.get(found.choice)) in found.values) != found.but:
        return ""
    with_what = "all but " * found.but + ", ".join(found.values)
    return f" with {name}.{found.choice}={value}: it is read with {with_what}"


def idle_length(recipe: Recipe, typed: set[str], steps_of_epochs: int) -> Iterator[str]:
    """Yields a note where epochs or max_steps has no effect, because the other one ends the run earlier."""
    most = recipe.max_steps
    if most is None:
        return
    if "max_steps" in typed and most > steps_of_epochs:
        yield (
            f"max_steps={most} has no effect: epochs={recipe.epochs} ends the run after {steps_of_epochs} "
            "steps; raise epochs"
        )
    if "epochs" in typed and "max_steps" not in typed and most < steps_of_epochs:
        yield (
            f"epochs={recipe.epochs} ({steps_of_epochs} steps) has no effect: max_steps={most} ends the run "
            "before; set max_steps=null"
        )


def own_defaults(recipe: Recipe, typed: set[str], own_optimizer: bool) -> str:
    """Returns a line on the default length and learning rate of a custom task; "" if none applies."""
    if recipe.task in TASKS:
        return ""
    unsaid = []
    if recipe.epochs == OWN_EPOCHS and recipe.max_steps == OWN_STEPS and not {"epochs", "max_steps"} & typed:
        unsaid.append(f"max_steps={OWN_STEPS}")
    if not own_optimizer and recipe.optim.lr == OWN_LR and "optim.lr" not in typed:
        unsaid.append(f"optim.lr={recipe.optim.lr:g}")
    if not unsaid:
        return ""
    return f"by default: {', '.join(unsaid)}; RECIPE and settings change that (epochs=10, say)"
