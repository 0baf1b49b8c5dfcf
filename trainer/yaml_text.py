"""YAML from people: safe, bounded, and with the scalars that one expects."""

import re
from typing import Any

import yaml

from trainer.errors import BadInputError

_NODES = 10_000


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of YAML 1.2, and keys that are words and stand there once.

    In PyYAML's YAML 1.1 `1e-3` is a string, `010` is 8, `1:30` is 90 and `on` is true.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            where = f"line {key_node.start_mark.line + 1}"
            if not isinstance(key_node, yaml.ScalarNode):
                raise BadInputError(f"{where}: a key is a word")
            if key_node.value in seen:
                raise BadInputError(f"{where}: key '{key_node.value}' stands there twice; remove one")
            seen.add(key_node.value)
        return {str(key): value for key, value in super().construct_mapping(node, deep).items()}


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"~|null|", ["~", "n", ""]),
    ("bool", r"true|false", list("tf")),
    ("int", r"[-+]?[0-9]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))


def parse_yaml(text: str, source: str) -> Any:
    """Parses YAML with bounds on what aliases can expand to.

    Args:
        text: YAML.
        source: Where it comes from, for messages.

    Raises:
        BadInputError: If it isn't YAML or grows beyond 10,000 values.
    """
    try:
        values = yaml.load(text, _Loader)
        size = _expanded(values, {}, ())
    except BadInputError as error:
        raise BadInputError(f"{source}: {error}") from error
    except Exception as error:  # PyYAML raises more than its own errors: KeyError for `!!bool x`, say
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        what = getattr(error, "problem", None) or "nested too deeply or malformed"
        if "alphabetic or numeric character" in what:
            what = 'a pattern that starts with * needs quotes of its own: ["*.norm*"]'
        raise BadInputError(f"{source}:{where} not valid YAML ({what})") from error
    if size > _NODES:
        raise BadInputError(
            f"{source}: more than {_NODES} values once its aliases are expanded; not a recipe"
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
