"""Base class of configurations: validation with errors that name key and remedy, list of keys, hash."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from trainer.config.elsewhere import setting_meant
from trainer.config.redact import redact, redact_text
from trainer.config.suggest import nearest, slip_of
from trainer.config.yaml_text import in_yaml
from trainer.errors import BadInputError

Config = TypeVar("Config", bound=BaseModel)


class Section(BaseModel):
    """Base of every part of a configuration: unknown keys, inf, NaN and booleans for numbers are errors."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        field: FieldInfo = cls.model_fields[str(info.field_name)]
        kind = _type_name(field.annotation)
        if any(isinstance(one, bool) for one in _members(value)) and "bool" not in kind:
            raise PydanticCustomError("bool", "true and false aren't allowed here")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _words_are_sound(cls, value: Any) -> Any:
        words = [one for one in _members(value) if isinstance(one, str | Path)]
        if any("\0" in str(one) for one in words):
            raise PydanticCustomError("nul", "it holds the character NUL, which no path or name can")
        if len(set(words)) < len(words):
            raise PydanticCustomError("twice", "it holds a word twice; remove one")
        return value


def _members(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def validated(model: type[Config], values: dict[str, Any], source: str) -> Config:
    """Turns values into a typed configuration.

    Args:
        model: Class of the configuration.
        values: Plain values, as read from YAML.
        source: Origin of the values, such as a file's name, for messages.

    Raises:
        BadInputError: If a key is unknown (the nearest known one is suggested), missing or has a wrong value.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise BadInputError(f"{source}: {_problem_of(model, error)}") from error


def refuse(reasons: Mapping[str, str | bool], remedy: str) -> None:
    """Refuses the first key that has a reason, in a validator.

    Args:
        reasons: What is wrong with each key, to follow its name; False for nothing.
        remedy: What to do, to follow the reason.

    Raises:
        ValueError: If there is a reason.
    """
    for key, reason in reasons.items():
        if reason:
            raise ValueError(f"{key}{reason}{remedy}")


def first_problem(error: ValidationError) -> str:
    """Returns place and message of an error's first problem."""
    problem = error.errors()[0]
    return f"{'.'.join(map(str, problem['loc'])) or 'all of it'}: {problem['msg']}"


def _problem_of(model: type[BaseModel], error: ValidationError) -> str:
    # An unknown key first: it is usually why another one is missing.
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    problem = problems[0]
    known = [key.name for key in describe(model)]
    others = len({_key_of(one["loc"], known) for one in problems}) - 1
    more = f" (and {others} more problem{'s' * (others > 1)})" * (others > 0)
    dotted = ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        inside, sections = problem["input"], {key.partition(".")[0] for key in known if "." in key}
        meant = nearest(dotted, sections) if isinstance(inside, dict) else ""
        while not meant and isinstance(inside, dict) and inside:  # no section is near: its first key may be
            name, inside = next(iter(inside.items()))
            dotted = f"{dotted}.{name}"
        meant = meant or _nearest_key(dotted, known)
        if dotted in known:  # as one key of the outermost mapping
            section, _, key = dotted.partition(".")
            meant = f"; in a mapping it is {section}: {{{key}: …}}"
        return f"unknown key '{dotted}'{meant}{more}"
    dotted = _key_of(problem["loc"], known)
    wanted = next((key.type for key in describe(model) if key.name == dotted), "")
    what = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "model_type":
        what = f"a section: give a key of it, such as {setting_meant(dotted) or f'{dotted}.KEY=VALUE'}"
    # Redacted before it is shortened, which could cut off what a secret is recognized by.
    given = redact_text(in_yaml(problem["input"]))
    given = given if len(given) < 60 else given[:57] + "..."
    if problem["type"] == "tuple_type":
        what = f"a list is wanted, such as '{dotted}=[{given}]'"
    if problem["type"] in ("path_type", "string_type"):
        quoted = f'["{given}"]' if wanted.startswith("[") else f'"{given}"'
        number = isinstance(problem["input"], int | float)
        what = f"a number; put a name in quotes: '{dotted}={quoted}'" if number else "not a name"
    if problem["type"] == "literal_error":
        what = f"no such value{nearest(str(problem['input']).lower(), wanted.split(' | '))}"
    if not wanted:  # a problem of a whole section
        return f"{dotted}: {what}{more}" if dotted else f"{what}{more}"
    # Messages of the trainer's own validators name the allowed values.
    allowed = "" if problem["type"] == "value_error" else f"; allowed: {_in_words(wanted)}"
    return f"{dotted}={given}: {what[:1].lower()}{what[1:]}{allowed}{more}"


# Types of keys in words for messages; literal values are shown as they are.
_WORDS = {
    "int": ["a whole number"],
    "float": ["a number"],
    "bool": ["true", "false"],
    "str": ["a word"],
    "Path": ["a path"],
    "null": ["null"],
    "[str, ...]": ["a list of words"],
    "[int, ...]": ["a list of whole numbers"],
    "[float, ...]": ["a list of numbers"],
    "[float, float]": ["a list of two numbers"],
}


def _in_words(kind: str) -> str:
    """Describes a key's type in words: "int | null" is "a whole number or null"."""
    parts = kind.split(" | ")
    if not _WORDS.keys() & parts:
        return kind
    *first, last = [word for part in parts for word in _WORDS.get(part, [part])]
    return f"{', '.join(first)} or {last}" if first else last


def _key_of(location: Sequence[int | str], known: Sequence[str]) -> str:
    """Returns the key of a problem; pydantic ends the location in a union with the member that it tried."""
    parts = [str(part) for part in location]
    ends = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((key for key in ends if key in known), ".".join(parts))


def _nearest_key(dotted: str, known: list[str]) -> str:
    """Returns "; did you mean 'KEY'?" for an unknown key, or what it is here, or where keys are shown."""
    head, _, tail = dotted.rpartition(".")
    # By the last part alone: a section that two keys have in common makes them similar, whatever they mean.
    everywhere = {key.rpartition(".")[2]: key for key in reversed(known)}
    beside = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == head}
    if meant := everywhere.get(tail):
        return f"; did you mean '{meant}'?"
    if meant := setting_meant(tail):
        return f"; here it is {meant}"
    for names in (beside, everywhere):
        if found := slip_of(tail, names):
            return f"; did you mean '{names[found]}'?"
    return "; --help-config shows every key"


class Key(NamedTuple):
    """Description of one key of a configuration.

    Attributes:
        name: Key with its sections, such as "data.path".
        type: Type as shown to the user, such as "int | null".
        default: Default as JSON, strings without quotes; "(required)" if there is none.
        description: Description of the key; "" if it has none.
    """

    name: str
    type: str
    default: str
    description: str


def describe(model: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """Yields every key of a configuration, in the order of definition; names begin with `prefix`."""
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
        more = field.json_schema_extra  # {"words": "int | auto"} is shown in place of the type
        shown = more.get("words") if isinstance(more, dict) else None
        yield Key(prefix + name, str(shown or _type_name(kind)), default.strip('"'), field.description or "")


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
    """Returns the SHA-256 of the resolved configuration, hexadecimal; runs with equal hashes train alike.

    Secrets are redacted first: the hash is stored, and a short secret could be guessed from it.
    """
    return hash_of(redact(config.model_dump(mode="json")))


def hash_of(values: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of a configuration's values, hexadecimal."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
