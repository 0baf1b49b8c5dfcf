"""Reading of a recipe: by name or path, from YAML or a task's file, with overrides by dotted key."""

import functools
import importlib.resources
import json
import operator
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from trainer.config.data import DataConfig
from trainer.config.dropped import refuse_dropped
from trainer.config.own_code import refuse_unnamed
from trainer.config.recipe import Recipe
from trainer.config.redact import redact_text
from trainer.config.section import describe, validated
from trainer.config.suggest import nearest
from trainer.config.task_file import custom_task_recipe, is_task_file, with_defaults
from trainer.config.tasks import TASKS
from trainer.config.yaml_text import parse_yaml, read_text
from trainer.errors import BadInputError

_MANIFEST = "manifest.json"  # in a run folder, beside its config.yaml
_WHOLE = (("data", "mix"), ("data", "class_weights"))  # keys whose value is a mapping
_MERGED = (("evaluation", "sets"), ("language", "chat_template_kwargs"))  # others; {} takes all away


def recipe_names() -> list[str]:
    """Returns the names of the recipes that come with the package."""
    folder = importlib.resources.files("trainer") / "recipes"
    return sorted(
        entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml")
    )


def recipe_text(name: str) -> str:
    """Returns a recipe of the package as it is written.

    Raises:
        BadInputError: If there is none of that name.
    """
    known = recipe_names()
    if name not in known:
        raise BadInputError(f"no recipe '{name}'{nearest(name, known)} (there are: {', '.join(known)})")
    return (importlib.resources.files("trainer") / "recipes" / f"{name}.yaml").read_text("utf-8")


def read_recipe(name: str) -> dict[str, Any]:
    """Reads a recipe of the package by its name, or of the user by its path.

    Raises:
        BadInputError: If there is none, or it isn't a mapping.
    """
    if name in recipe_names():
        return parse_recipe(recipe_text(name), name)
    path = Path(name)
    if is_task_file(name):
        return custom_task_recipe(name)
    if path.is_dir():
        raise BadInputError(
            f"{path} is a folder, and no recipe; to resume the run give --resume {path}, to begin a new one "
            f"with its weights --init-from {path}, to train its configuration again {path / 'config.yaml'}"
        )
    if path.suffix == ".json" and (path.parent / "config.yaml").is_file():
        raise BadInputError(f"{path} is no recipe; the run's configuration is {path.parent / 'config.yaml'}")
    if path.suffix not in (".yaml", ".yml"):
        known = recipe_names()
        raise BadInputError(
            f"no recipe '{name}'{nearest(name, known)} (there are: {', '.join(known)}, a .yaml "
            "file, or a .py file with a task)"
        )
    return parse_recipe(
        read_text(path, str(path), "a recipe", "give the path of a recipe in YAML"), str(path)
    )


def parse_recipe(text: str, source: str) -> dict[str, Any]:
    """Parses a recipe in YAML.

    Raises:
        BadInputError: If it isn't YAML, or isn't a mapping.
    """
    values = parse_yaml(text, source)
    if not isinstance(values, dict):
        kind = {type(None): "an empty file", list: "a list"}.get(type(values), "a single value")
        raise BadInputError(f"{source}: a recipe is a mapping such as 'optim: {{lr: 0.1}}', not {kind}")
    return values


def override(values: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Applies settings such as "optim.lr=0.1" or "optim={lr: 0.1}"; other keys keep their values.

    A mapping that is one key's value, as that of data.mix, takes the place of the one before.

    Raises:
        BadInputError: If a setting isn't KEY=VALUE.
    """
    for setting in settings:
        dotted, equals, text = setting.partition("=")
        names = dotted.strip().split(".")
        if equals and not text.strip():
            raise BadInputError(f"{setting}: the value is missing; give one (null where none is meant)")
        if not equals or not all(names):
            raise BadInputError(f"{setting}: give KEY=VALUE, such as optim.lr=0.1")
        value = parse_yaml(text, setting)
        if str(value).count("#") < text.count("#"):  # a path, say: on a command line nobody comments
            raise BadInputError(f"{setting}: ' #' begins a comment in YAML; give KEY='\"VALUE\"'")
        whole = [one for one in (*_WHOLE, *(_MERGED if value == {} else ())) if len(names) <= len(one)]
        for name in reversed(names):
            value = {name: value}
        values = _merged(values, value, setting, whole)
    return values


def _merged(
    values: dict[str, Any], changes: dict[str, Any], setting: str, whole: Sequence[tuple[str, ...]]
) -> dict[str, Any]:
    merged = dict(values)
    for name, change in changes.items():
        kept = values.get(name)
        if isinstance(change, dict) and kept is not None and (name,) not in whole:
            if not isinstance(kept, dict):
                raise BadInputError(f"{setting}: '{name}' is a value and has no keys below it")
            within = [one[1:] for one in whole if one[0] == name]
            change = _merged(kept, change, setting, within)  # noqa: PLW2901
        merged[name] = change
    return merged


def make_recipe(values: dict[str, Any], settings: Sequence[str] = (), source: str = "recipe") -> Recipe:
    """Returns a configuration whose keys were all checked.

    Args:
        values: Values as in a YAML file: `{"epochs": 3, "optim": {"lr": 0.1}}`. `epochs` is required,
            except for a custom task.
        settings: Overrides as for --set, such as "optim.lr=0.1".
        source: Name of the values in errors.

    Raises:
        BadInputError: For the first value that is wrong.
    """
    given = override(values, settings)
    refuse_dropped(values, given, source)
    values = given
    for key, value in _texts(values):
        if not value.isprintable() and any("\ud800" <= sign <= "\udfff" for sign in value):
            shown = value.encode(errors="backslashreplace").decode()
            raise BadInputError(
                f"{key}={shown}: isn't UTF-8, so no file can hold it; give that file or folder another name"
            )
    own = isinstance(task := values.get("task"), str) and task not in TASKS
    return validated(Recipe, with_defaults(values) if own else values, source)


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yields the strings and paths among the values of a recipe, each with its key."""
    if isinstance(value, str | Path):
        yield key, str(value)
    for name, part in value.items() if isinstance(value, dict) else ():
        yield from _texts(part, f"{key}.{name}" if key else str(name))
    for part in value if isinstance(value, list | tuple) else ():
        yield from _texts(part, key)


def load_recipe(name: str, settings: Sequence[str], values: dict[str, Any] | None = None) -> Recipe:
    """Returns a recipe by its name or path, or from a run's values, with settings; see `make_recipe`."""
    recipe = make_recipe(read_recipe(name) if values is None else values, settings, name)
    if values is None:
        _refuse_code_of_run(name, recipe, settings)
    return recipe


def _refuse_code_of_run(name: str, recipe: Recipe, settings: Sequence[str]) -> None:
    """Refuses code that a recipe in a run folder names: it is its sender's, not the user's."""
    path = Path(os.path.realpath(name))
    if path.suffix in (".yaml", ".yml") and path.with_name(_MANIFEST).is_file():
        refuse_unnamed(name, recipe, override({}, settings), flag="")


def provisional(
    name: str, settings: Sequence[str], values: dict[str, Any] | None = None
) -> tuple[Recipe, bool]:
    """Returns a recipe, and whether its micro-batch is auto; then it has the recipe's own number, or a part.

    Args:
        name: Name of the recipe, or its path.
        settings: Overrides as for --set.
        values: Values of a run's configuration; None to read the recipe by its name.

    Raises:
        BadInputError: For the first value that is wrong.
    """
    before = read_recipe(name) if values is None else values
    of_file, values = values is None, override(before, settings)
    refuse_dropped(before, values, name)
    data = values.get("data")
    auto = isinstance(data, Mapping) and data.get("micro_batch_size") == "auto"
    if auto:
        whole = values["data"].get("global_batch_size", DataConfig.model_fields["global_batch_size"].default)
        own = (before.get("data") or {}).get("micro_batch_size")
        number = own if isinstance(own, int) else DataConfig.model_fields["micro_batch_size"].default
        if isinstance(whole, int) and whole > 0:  # the largest part of it that isn't larger
            counts = range(-(-whole // number), whole + 1)
            number = whole // next(count for count in counts if whole % count == 0)
        values = {**values, "data": {**values["data"], "micro_batch_size": number}}
    recipe = make_recipe(values, source=name)
    if of_file:
        _refuse_code_of_run(name, recipe, settings)
    return recipe, auto


def key_lines(name: str, recipe: Recipe, auto: bool, section: str = "", width: int = 100) -> Iterator[str]:
    """Yields lines about each key, by section: name, type, default, the recipe's value, meaning.

    Args:
        name: Name of the recipe.
        recipe: The recipe.
        auto: True if its micro-batch is chosen later.
        section: Section or key, such as "optim", "model.lora" or "optim.lr"; "": all.
        width: Columns of a line.

    Raises:
        BadInputError: If there is no such section or key.
    """
    keys = [key for key in describe(Recipe) if not section or f"{key.name}.".startswith(f"{section}.")]
    if not keys:
        sections = dict.fromkeys(key.name.rpartition(".")[0] for key in describe(Recipe) if "." in key.name)
        raise BadInputError(
            f"--help-config {section}: no such section or key{nearest(section, sections)} "
            f"(there are: {', '.join(sections)})"
        )
    values = recipe.model_dump(mode="json")
    if auto:
        values["data"]["micro_batch_size"] = "auto"
    for place, inside in groupby(keys, lambda key: key.name.rpartition(".")[0]):
        yield f"\n{place or 'the run'}:"
        for key in inside:
            value = functools.reduce(operator.getitem, key.name.split("."), values)
            shown = redact_text(value if isinstance(value, str) else json.dumps(value))
            here = "" if shown == key.default else f"; {Path(name).name}: {shown}"
            default = key.default if key.default == "(required)" else f"default {key.default or '(none)'}"
            yield from _wrapped(f"{key.name}  {key.type}; {default}{here}", width, 2, 6)
            yield from _wrapped(key.description, width, 6, 6)


def _wrapped(text: str, width: int, first: int, later: int) -> list[str]:
    wrapper = textwrap.TextWrapper(max(width, 40), break_long_words=False, break_on_hyphens=False)
    wrapper.initial_indent, wrapper.subsequent_indent = " " * first, " " * later
    return wrapper.wrap(text)
