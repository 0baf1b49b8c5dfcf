"""Writes what the documentation takes from the code: `make docs`.

Whole pages: docs/configuration.md (the schema in trainer/config), docs/api.md (docstrings), docs/cli.md (the
parsers). Tables in others, between `<!-- made: NAME -->` and `<!-- end -->`: recipes, other trainers' words,
changes of bits.
"""

import argparse
import ast
import inspect
import json
import os
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

import trainer
from trainer.cli import make_parser
from trainer.config import elsewhere
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import read_recipe, recipe_names
from trainer.config.section import Key, describe
from trainer.version import ARITHMETIC_CHANGES

DOCS = Path(__file__).parent.parent / "docs"
_KEYS = """# All keys

A key is set on the command line (`trainer train digits optim.lr=0.003`) or in a recipe's YAML file. `trainer
train RECIPE --help-config [SECTION]` prints this list with the recipe's values. Words in brackets at the
end of a description name the choice that reads the key. `scripts/reference.py` makes this page from the
schema.
"""
_API = """# Python API

`from trainer import NAME` gives these names. They are stable; everything else in the package may be moved or
changed. [Custom tasks and hooks](your-own-task.md) shows how they are used. `scripts/reference.py` makes this
page from the docstrings.
"""
_CLI = """# Command line

Bad input is one line on standard error with exit code 2; [exit codes](recipes.md#exit-codes) has the
others. `scripts/reference.py` makes this page from the parsers.
"""
# What a docstring calls its parts, and the page.
_PARTS = {"Args:": "Arguments", "Attributes:": "Attributes", "Returns:": "Returns", "Raises:": "Raises"}


def keys_page() -> str:
    """The page of all keys, in Markdown."""
    text = _KEYS
    for section, keys in groupby(describe(Recipe), lambda key: key.name.rpartition(".")[0]):
        about = _about(section)
        text += (
            f"\n## {section or 'The run'}\n{about}\n| key | type | default | meaning |\n|---|---|---|---|\n"
        )
        text += "".join(map(_row, keys))
    return text


def _about(section: str) -> str:
    model: Any = Recipe
    for name in section.split("."):
        model = model.model_fields[name].annotation if name else type(None)
    return f"\n{' '.join(model.__doc__.split())}\n" if section and model.__doc__ else ""


def _row(key: Key) -> str:
    cells = (
        f"`{key.name}`",
        _code(key.type.replace(" | ", " or ")),
        _code(key.default),
        _prose(key.description),
    )
    return f"| {' | '.join(cells)} |\n"


def _prose(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


def _code(text: str) -> str:
    assert "|" not in text, text  # GitHub and MkDocs escape it in different ways
    return f"`{text}`" if text else ""


def api_page() -> str:
    """The page of the public names, in Markdown."""
    text = _API
    for chapter, names in trainer.PUBLIC.items():
        text += f"\n## {chapter}\n"
        for name, module in names.items():
            text += f"\n### {name}\n\n" + "\n".join(_entry(name, f"trainer.{module}"))
    return text


def _entry(name: str, module: str) -> Iterator[str]:
    """The lines of a class, a function, or a type that has only a name."""
    thing: Any = getattr(trainer, name)
    source = inspect.getsource(
        thing if inspect.isroutine(thing) or inspect.isclass(thing) else import_module(module)
    )
    found = next(node for node in ast.parse(textwrap.dedent(source)).body if _defines(node, name))
    if isinstance(found, ast.Assign):  # what its module says of it
        paragraphs = (inspect.getdoc(import_module(module)) or "").split("\n\n")
        about = [paragraph for paragraph in paragraphs if name.lower() in paragraph.lower()]
        yield from (*_block(ast.unparse(found)), *"\n\n".join(about[-1:]).splitlines(), "")
    elif isinstance(found, ast.FunctionDef):
        yield from (*_block(_signature(found)), *_docstring(found))
    elif isinstance(found, ast.ClassDef):
        yield from _docstring(found)
        for member in found.body:
            if isinstance(member, ast.FunctionDef) and not re.match("_(?!_len__)", member.name):
                yield from (*_block(_signature(member)), *_docstring(member))


def _defines(node: ast.stmt, name: str) -> bool:
    targets = [target.id for target in getattr(node, "targets", ()) if isinstance(target, ast.Name)]
    return getattr(node, "name", None) == name or name in targets


def _signature(function: ast.FunctionDef) -> str:
    returned = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    whole = f"{function.name}({ast.unparse(function.args)}){returned}"
    if len(whole) <= 110:
        return whole
    alone = ast.parse(f"def {whole}: pass").body[0]
    assert isinstance(alone, ast.FunctionDef)
    words = re.sub(r", (?=(?:\*|\w+[:=,]|\w+$))", ",\n    ", ast.unparse(alone.args))
    return f"{function.name}(\n    {words},\n){returned}"


def _block(code: str) -> tuple[str, ...]:
    return ("```python", code, "```", "")


def _docstring(node: ast.FunctionDef | ast.ClassDef) -> Iterator[str]:
    """Returns the lines of a docstring; entries below "Args:" and the like become a list."""
    inside = False
    for line in (ast.get_docstring(node) or "").splitlines():
        if line in _PARTS:
            inside = True
            yield from (f"**{_PARTS[line]}**", "")
        elif inside and (found := re.match(r"    ([\w.*]+): (.*)", line)):
            yield f"- `{found[1]}`: {found[2]}"
        elif inside and line.startswith("        "):
            yield f"  {line.strip()}"
        else:
            inside = inside and line.startswith("    ")
            yield line.strip()
    yield ""


def cli_page() -> str:
    """The page of all commands and flags, in Markdown."""
    os.environ["COLUMNS"] = "100"  # argparse's width
    commands = _commands(make_parser())
    groups = [
        f"\n## trainer {name}\n\n```\n{parser.format_help().strip()}\n```\n" for name, parser in commands
    ]
    return _CLI + "".join(groups)


def _commands(
    parser: argparse.ArgumentParser, before: str = ""
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """The parsers of all commands, and of commands in them."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inside in action.choices.items():
                yield f"{before}{name}", inside
                yield from _commands(inside, f"{before}{name} ")


def recipes_table() -> str:
    """All recipes: what they train, and what they reach, where measured (docs/results/tasks.json)."""
    measured = json.loads((DOCS / "results/tasks.json").read_text())["parts"][0]["tables"][0]["rows"]
    reached = {row[0].strip("`").split()[-1]: row[1] for row in measured}
    text = "| recipe | trains | reaches |\n|---|---|---|\n"
    for name in recipe_names():
        text += (
            f"| `{name}` | {_prose(read_recipe(name)['about'])} | {reached.get(name, 'not trained here')} |\n"
        )
    return text


def words_table() -> str:
    """Other trainers' words for flags, keys and commands."""
    return f"| here | there |\n|---|---|\n{elsewhere.words_in_rows()}"


def arithmetic_table() -> str:
    """Changes of bits, by number."""
    rows = "".join(f"| {number} | {_prose(about)} |\n" for number, about in ARITHMETIC_CHANGES.items())
    return f"| number | changes |\n|---|---|\n{rows}"


_TABLES = {"recipes": recipes_table, "words": words_table, "arithmetic": arithmetic_table}


def with_tables(page: str) -> str:
    """The page with its tables made anew."""
    text = (DOCS / page).read_text()
    for name, table in _TABLES.items():
        before, mark, rest = text.partition(f"<!-- made: {name} -->\n")
        if mark:
            text = f"{before}{mark}{table()}<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return text


PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": keys_page,
    "api.md": api_page,
    "cli.md": cli_page,
    **{page: partial(with_tables, page) for page in ("recipes.md", "from-other-trainers.md", "check.md")},
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
        print(f"docs/{name}")
