"""Parser for YAML from users: safe, bounded, and with the scalars of YAML 1.2."""

import re
import sys
from pathlib import Path
from typing import Any

import yaml

from trainer.errors import BadInputError, reading

_NODES = 10_000
_FILE_BYTES = 1 << 20


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader: scalars of YAML 1.2, keys that are strings and unique, no merge keys.

    In PyYAML's YAML 1.1 `1e-3` is a string, `010` is 8, `1:30` is 90 and `on` is true. Merge keys copy their
    targets: forty lines fill any memory.
    """

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Leaves a mapping unchanged.

        Raises:
            BadInputError: If a key has the explicit tag `!!merge`.
        """
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                raise BadInputError(f"line {key.start_mark.line + 1}: no merge keys; write the values out")

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, value in node.value:
            where = f"line {key_node.start_mark.line + 1}"
            if not isinstance(key_node, yaml.ScalarNode):
                raise BadInputError(f"{where}: a key must be a plain word")
            if key_node.value in seen:
                raise BadInputError(f"{where}: key '{key_node.value}' is given twice; remove one")
            seen.add(key_node.value)
            # `{a:1}` is YAML for a key 'a:1' without a value.
            if node.flow_style and ":" in key_node.value and getattr(value, "value", None) == "":
                raise BadInputError(
                    f"{where}: '{key_node.value}' is a key without a value; write a space after the colon"
                )
        self.flatten_mapping(node)
        return {key.value: self.construct_object(value, deep) for key, value in node.value}


# The dumper of libyaml is ten times as fast; not every PyYAML has it.
class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """PyYAML's safe dumper: it quotes what YAML 1.1 or `_Loader` reads as anything but a string."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"~|null|", ["~", "n", ""]),
    ("bool", r"true|false", list("tf")),
    ("int", r"[-+]?[0-9]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", list("-+.0123456789")),
):
    for _kind in (_Loader, _Dumper):
        _kind.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))


def read_text(path: Path, shown: str, kind: str, remedy: str) -> str:
    """Returns the text of a YAML file of the user, which may be a pipe.

    Args:
        path: The file.
        shown: Its name in messages.
        kind: What a file larger than 1 MiB isn't.
        remedy: What to do if it can't be read.

    Raises:
        BadInputError: If it can't be read, is larger than 1 MiB, or isn't UTF-8.
    """
    with reading(shown, remedy), path.open("rb") as file:  # a pipe and a device have a size of 0
        data = file.read(_FILE_BYTES + 1)
    if len(data) > _FILE_BYTES:
        raise BadInputError(f"{shown}: larger than 1 MiB, so not {kind}")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BadInputError(f"{shown}: not a text file in UTF-8") from error


def parse_yaml(text: str, source: str) -> Any:
    """Parses YAML with bounds on what aliases can expand to.

    Args:
        text: YAML.
        source: Origin of the text, for messages.

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
        where = f" line {mark.line + 1}:" if mark else ""
        what = getattr(error, "problem", None) or _why(error)
        if "alphabetic or numeric character" in what:
            what = 'a pattern that starts with * needs quotes of its own: ["*.norm*"]'
        raise BadInputError(f"{source}:{where} not valid YAML ({what})") from error
    if size > _NODES:
        raise BadInputError(
            f"{source}: more than {_NODES} values once its aliases are expanded; not a recipe"
        )
    return values


def _why(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if not isinstance(error, yaml.reader.ReaderError):
        return "malformed"
    if 0xDC80 <= error.character <= 0xDCFF:  # how Python keeps a byte that it couldn't decode
        return (
            f"it isn't text in the locale's encoding, which is {sys.getfilesystemencoding()}: set "
            "LC_ALL=C.UTF-8 or PYTHONUTF8=1"
        )
    return f"character U+{error.character:04X} isn't allowed; remove it"


def to_yaml(values: Any, **options: Any) -> str:
    """Formats values as YAML that `parse_yaml` reads as the same values; options as of `yaml.dump`."""
    return str(yaml.dump(values, Dumper=_Dumper, sort_keys=False, **options))


def in_yaml(value: Any) -> str:
    """Formats a value as YAML in one line: null and true for None and True."""
    if isinstance(value, str):
        return value
    try:
        text = to_yaml(value, default_flow_style=True, width=1 << 20, allow_unicode=True)
    except yaml.YAMLError:  # from Python one may give anything
        return str(value)
    return text.removesuffix("\n").removesuffix("...").rstrip()


def _expanded(value: Any, known: dict[int, int], above: tuple[int, ...]) -> int:
    """Counts the values of a tree with repeated parts, each as often as it is referred to."""
    if not isinstance(value, dict | list | tuple):  # tuples of !!omap and !!pairs
        return 1
    if id(value) in above:
        raise BadInputError("an alias that contains itself; write the values out")
    if id(value) not in known:
        members = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_expanded(member, known, (*above, id(value))) for member in members)
    return known[id(value)]
