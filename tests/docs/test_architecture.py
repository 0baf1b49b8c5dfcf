"""Promise: each of eight facts is decided in at most four files; a public name stands in one module."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.docs.count import count, shared_names

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "trainer"
MOST = 4


class Fact(NamedTuple):
    """A row of the table.

    Attributes:
        files: Where it is decided.
        defines: Names of functions, classes, methods and fields that stand in these files.
        nowhere_else: What no other file may use: a name, `.attribute`, "text", a number, or
            `.attribute == "text"`, a comparison of both.
    """

    name: str
    files: tuple[str, ...]
    defines: tuple[str, ...]
    nowhere_else: tuple[str, ...]


def read_facts(page: str) -> list[Fact]:
    """The rows of the table under the heading "Eight facts"."""
    table = page.partition("\n## Eight facts")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "| `" in line
    ]
    return [Fact(row[0], *(tuple(re.findall(r"`([^`]+)`", cell)) for cell in row[1:])) for row in rows]


FACTS = read_facts((ROOT / "docs" / "architecture.md").read_text())


def _definitions(tree: ast.Module) -> Iterator[str]:
    """Names that a module or a class of it defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.Module | ast.ClassDef):
            for part in node.body:
                targets = part.targets if isinstance(part, ast.Assign) else []
                targets = [part.target] if isinstance(part, ast.AnnAssign) else targets
                yield from (target.id for target in targets if isinstance(target, ast.Name))


def _marks(tree: ast.Module) -> Iterator[str]:
    """What a module uses, in the words of the table."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.Name(id=name)
                | ast.FunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.alias(name=name)
            ):
                yield name
            case ast.Attribute(attr=name):
                yield from (name, f".{name}")
            case ast.Constant(value=str(text)):
                yield f'"{text}"'
            case ast.Constant(value=value) if type(value) is int:
                yield str(value)
            case ast.Compare():
                parts = list(ast.walk(node))
                constants = [part.value for part in parts if isinstance(part, ast.Constant)]
                texts = [value for value in constants if isinstance(value, str)]
                names = [part.attr for part in parts if isinstance(part, ast.Attribute)]
                yield from (
                    f'.{name} == "{text}"' for name in names for text in texts if isinstance(text, str)
                )


@functools.cache
def _trees() -> dict[str, ast.Module]:
    return {str(file.relative_to(PACKAGE)): ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py")}


@functools.cache
def _package() -> dict[str, tuple[frozenset[str], frozenset[str]]]:
    """Definitions and marks of each file."""
    return {file: (frozenset(_definitions(tree)), frozenset(_marks(tree))) for file, tree in _trees().items()}


def test_there_are_eight() -> None:
    assert len(FACTS) == 8


@pytest.mark.xdist_group("architecture")  # the package is parsed once
@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.name)
def test_a_fact_is_decided_in_its_files_alone(fact: Fact) -> None:
    assert 0 < len(fact.files) <= MOST and fact.defines and fact.nowhere_else
    package = _package()
    assert set(fact.files) <= set(package)
    there = {name: {file for file, (names, _) in package.items() if name in names} for name in fact.defines}
    assert {name: files for name, files in there.items() if not files or files - set(fact.files)} == {}
    assert set(fact.files) <= {file for files in there.values() for file in files} | {
        file for file in fact.files if package[file][1] & set(fact.nowhere_else)
    }  # none stands there for nothing
    used = {
        mark: {file for file, (_, marks) in package.items() if mark in marks} for mark in fact.nowhere_else
    }
    assert {mark: files - set(fact.files) for mark, files in used.items() if files - set(fact.files)} == {}
    assert all(used.values())  # none is a word that the package doesn't have


def test_the_table_names_the_rooms_in_the_order_that_is_held() -> None:
    settings = (ROOT / "pyproject.toml").read_text()
    layers = re.findall(r'"(\w+)"', settings.partition("\nlayers = [")[2].partition("]")[0])
    text = (ROOT / "docs/architecture.md").read_text()
    table = text.partition("| room | what lives there |\n|---|---|\n")[2].partition("\n\n")[0]
    named = re.findall(r"^\| `(\w+)`", table, re.MULTILINE)
    assert named == [layer for layer in reversed(layers) if (PACKAGE / layer).is_dir()]
    assert "`trainer/` has thirteen rooms." in text and len(named) == 13


@pytest.mark.xdist_group("architecture")
def test_a_public_name_means_one_thing() -> None:
    assert shared_names(_trees()) == {}


def test_marks_of_all_kinds() -> None:
    code = (
        'from a import rank_memory\nif one.workers in ("auto", 75) or kinds["spike"]:\n    f = one.policy\n'
    )
    marks = set(_marks(ast.parse(code)))
    assert {"rank_memory", ".workers", '.workers == "auto"', '"spike"', "75", ".policy", "kinds"} <= marks
    assert '.policy == "auto"' not in marks


def test_a_sample_is_counted(tmp_path: Path) -> None:
    sample = '''"""A module.

Two lines of it.
"""

import os  # code, with a comment
# a comment

LIMIT = """
not a docstring"""
_OWN = 1


class One:
    """Of one line."""

    def method(self):
        return (
            os,
        )


def main(): ...
'''
    (tmp_path / "one.py").write_text(sample)
    (tmp_path / "two.py").write_text(
        "LIMIT: int = 2\n_OWN = 3\ndef main(): ...\nasync def other():\n    '''Doc.'''\n"
    )
    found = count(tmp_path.glob("*.py"))
    assert (found.files, found.lines) == (2, 28)
    assert (found.code, found.doc, found.comment) == (10 + 4, 5 + 1, 1)
    assert (found.classes, found.functions, sorted(found.lengths)) == (1, 4, [1, 1, 2, 4])
    assert list(found.shared) == ["LIMIT"]
