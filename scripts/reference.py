"""Writes docs/configuration.md (the schema in trainer/config) and docs/api.md (docstrings) for make docs."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

import trainer
from trainer.config.recipe import Recipe
from trainer.config.section import Key, describe

DOCS = Path(__file__).parent.parent / "docs"
_KEYS = """# All keys

Made from the schema by `scripts/reference.py`. `trainer train RECIPE --help-config` prints the same, with the
recipe's own values. Any key can be set on the command line, `--set optim.lr=0.003`, or in a recipe's YAML
file. Words in brackets at the end of a description name the choice that reads the key.
"""
_API = """# API

Made from the docstrings by `scripts/reference.py`. `from trainer import NAME` gives these names, and they
stay; everything else in the package may be moved or changed. [Custom tasks and hooks](your-own-task.md) is
the tutorial.
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


PAGES = {"configuration.md": keys_page, "api.md": api_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
        print(f"docs/{name}")
