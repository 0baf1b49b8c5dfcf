"""Promise: docstrings and messages keep to the words of the table in docs/architecture.md."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORDS = (ROOT / "docs/architecture.md").read_text().partition("\n## Words")[2].partition("\n## ")[0]
LINES = [line for line in WORDS.splitlines() if line.startswith("| ")]
NOT = re.compile(
    rf"\b({'|'.join(re.findall(r'`([^`]+)`', ''.join(line.split('|')[3] for line in LINES)))})\b"
)
FIRST = tuple(re.findall(r"`([^`]+)`", WORDS.partition("not with")[2]))
KEPT: set[tuple[str, str]] = set()  # exceptions: file and phrase


def held() -> list[str]:
    """Files of the package that are held to the words, from its folder on."""
    return sorted(str(file.relative_to(ROOT / "trainer")) for file in (ROOT / "trainer").rglob("*.py"))


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Docstrings of a module, and of its functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def texts(tree: ast.Module) -> Iterator[str]:
    """All texts of a module of several words, messages and docstrings alike, each in one line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield " ".join(node.value.split())


def _is_odd(docstring: str) -> bool:
    return docstring.partition(" ")[0] in FIRST


def test_the_table_is_read() -> None:
    assert NOT.search("and goes on from there") and not NOT.search("resumes from there")
    assert {"What", "Of", "Those"} <= set(FIRST) and len(held()) > 150


@pytest.mark.parametrize("room", sorted({file.rpartition("/")[0] for file in held()}))
def test_a_room_keeps_to_the_words(room: str) -> None:
    found = []
    for file in held():
        if file.rpartition("/")[0] == room:
            tree = ast.parse((ROOT / "trainer" / file).read_text())
            found += [
                (file, match[0], text[:80])
                for text in texts(tree)
                for match in NOT.finditer(text)
                if (file, match[0]) not in KEPT
            ]
            found += [(file, "first word", text[:80]) for text in docstrings(tree) if _is_odd(text)]
    assert not found


@pytest.mark.parametrize("root", ["benchmarks", "scripts"])
def test_docstrings_beside_the_package_begin_with_noun_or_verb(root: str) -> None:
    trees = {file.name: ast.parse(file.read_text()) for file in sorted((ROOT / root).rglob("*.py"))}
    odd = [(name, one[:80]) for name, tree in trees.items() for one in docstrings(tree) if _is_odd(one)]
    assert trees and not odd
