"""Configuration: a recipe in YAML, overrides by dotted key, errors that name the key and the remedy."""

import hashlib
import importlib.resources
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from trainer.errors import BadInputError
from trainer.suggest import nearest

Config = TypeVar("Config", bound=BaseModel)

_FILE_BYTES = 1 << 20
_NODES = 10_000


def recipe_names() -> list[str]:
    """Names of the recipes that come with the package."""
    folder = importlib.resources.files("trainer") / "recipes"
    return sorted(
        entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml")
    )


def read_recipe(name: str) -> dict[str, Any]:
    """Reads a recipe of the package by its name, or of the user by its path.

    Raises:
        BadInputError: If there is none or it isn't a mapping.
    """
    if name in recipe_names():
        text = (importlib.resources.files("trainer") / "recipes" / f"{name}.yaml").read_text("utf-8")
        return parse_recipe(text, name)
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        known = recipe_names()
        raise BadInputError(
            f"no recipe '{name}'{nearest(name, known)} (there are: {', '.join(known)}, or a .yaml file)"
        )
    try:
        if path.stat().st_size > _FILE_BYTES:
            raise BadInputError(f"{path}: larger than 1 MiB, so not a recipe")
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path}: not a text file in UTF-8") from error
    except OSError as error:
        raise BadInputError(
            f"{path}: can't be read ({error.strerror}); give the path of a recipe in YAML"
        ) from error
    return parse_recipe(text, str(path))


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, without the silent overwriting of a key that stands there twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value
            if key in seen:
                raise BadInputError(
                    f"line {key_node.start_mark.line + 1}: key '{key}' stands there twice; remove one"
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def parse_recipe(text: str, source: str) -> dict[str, Any]:
    """Parses YAML with bounds on what aliases can expand to.

    Raises:
        BadInputError: If it isn't YAML, isn't a mapping, or grows beyond 10,000 values.
    """
    try:
        values = yaml.load(text, _Loader)
        size = _expanded(values, {}, ())
    except BadInputError as error:
        raise BadInputError(f"{source}: {error}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        what = getattr(error, "problem", None) or "nested too deeply or malformed"
        raise BadInputError(f"{source}:{where} not valid YAML ({what})") from error
    if size > _NODES:
        raise BadInputError(
            f"{source}: more than {_NODES} values once its aliases are expanded; not a recipe"
        )
    if not isinstance(values, dict):
        raise BadInputError(
            f"{source}: a recipe is a mapping such as 'optim: {{lr: 0.1}}', not {type(values).__name__}"
        )
    return values


def _expanded(value: Any, known: dict[int, int], above: tuple[int, ...]) -> int:
    """Values in a tree that shares parts, each part counted as often as it is referred to."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) in above:
        raise BadInputError("an alias that contains itself; write the values out")
    if id(value) not in known:
        members = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_expanded(member, known, (*above, id(value))) for member in members)
    return known[id(value)]


def override(values: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Applies settings such as "optim.lr=0.1"; each value is parsed as YAML.

    Raises:
        BadInputError: If a setting isn't KEY=VALUE.
    """
    values = json.loads(json.dumps(values, default=str))
    for setting in settings:
        dotted, equals, text = setting.partition("=")
        names = dotted.strip().split(".")
        if not equals or not all(names):
            raise BadInputError(f"--set {setting}: give KEY=VALUE, such as --set optim.lr=0.1")
        target = values
        for name in names[:-1]:
            target = target.setdefault(name, {})
            if not isinstance(target, dict):
                raise BadInputError(f"--set {setting}: '{name}' is a value and has no keys below it")
        try:
            target[names[-1]] = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise BadInputError(f"--set {setting}: the value isn't valid YAML; quote it") from error
    return values


def validated(model: type[Config], values: dict[str, Any], source: str) -> Config:
    """Turns values into a typed configuration.

    Raises:
        BadInputError: For the first unknown key (with the nearest one) or wrong value.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise BadInputError(f"{source}: {_first_problem(model, error)}") from error


def _first_problem(model: type[BaseModel], error: ValidationError) -> str:
    # An unknown key first: it is usually why another one is missing.
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    problem = problems[0]
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    location = [str(part) for part in problem["loc"]]
    known = [key.name for key in describe(model)]
    dotted = ".".join(location)
    if problem["type"] == "extra_forbidden":
        return f"unknown key '{dotted}'{_nearest_key(dotted, known)}{more}"
    # A union's location ends with the name of the member that was tried.
    while location and ".".join(location) not in known:
        location.pop()
    dotted = ".".join(location) or dotted
    wanted = next((key.type for key in describe(model) if key.name == dotted), "")
    given = str(problem["input"])
    given = given if len(given) < 60 else given[:57] + "..."
    allowed = f"; allowed: {wanted}" if wanted else ""
    return f"{dotted}={given}: {problem['msg'][:1].lower()}{problem['msg'][1:]}{allowed}{more}"


def _nearest_key(dotted: str, known: list[str]) -> str:
    head, _, tail = dotted.rpartition(".")
    beside = [key for key in known if key.rpartition(".")[0] == head]
    same_tail = [key for key in known if key.rpartition(".")[2] == tail]
    if same_tail:
        return f"; did you mean '{same_tail[0]}'?"
    return nearest(dotted, beside) or nearest(dotted, known) or "; --help-config shows every key"


class Key(NamedTuple):
    """One key of a configuration, for people."""

    name: str
    type: str
    default: str
    description: str


def describe(model: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """Every key of a configuration, in the order of its definition."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from describe(kind, f"{prefix}{name}.")
            continue
        default = (
            "(required)"
            if field.is_required()
            else json.dumps(field.get_default(call_default_factory=True), default=str)
        )
        yield Key(prefix + name, _type_name(kind), default.strip('"'), field.description or "")


def _type_name(kind: Any) -> str:
    if kind is None or kind is type(None):
        return "null"
    arguments = getattr(kind, "__args__", None)
    if not arguments:
        return kind.__name__ if isinstance(kind, type) else str(kind)
    if getattr(kind, "__origin__", None) is tuple:
        return "[" + ", ".join("..." if part is Ellipsis else _type_name(part) for part in arguments) + "]"
    parts = [part if isinstance(part, str) else _type_name(part) for part in arguments]
    return " | ".join(parts)


def config_hash(config: BaseModel) -> str:
    """SHA-256 of the resolved configuration, hexadecimal: two runs with the same hash train the same."""
    text = json.dumps(config.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
