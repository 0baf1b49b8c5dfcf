"""Promise: the page names the rooms as they are held; a public name stands in one module."""

import ast
import re
from pathlib import Path

from tests.docs.count import count, shared_names

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "trainer"


def _trees() -> dict[str, ast.Module]:
    return {str(file.relative_to(PACKAGE)): ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py")}


def test_the_table_names_the_rooms_in_the_order_that_is_held() -> None:
    settings = (ROOT / "pyproject.toml").read_text()
    layers = re.findall(r'"(\w+)"', settings.partition("\nlayers = [")[2].partition("]")[0])
    text = (ROOT / "docs/architecture.md").read_text()
    table = text.partition("| room | what lives there |\n|---|---|\n")[2].partition("\n\n")[0]
    named = re.findall(r"^\| `(\w+)`", table, re.MULTILINE)
    assert named == [layer for layer in reversed(layers) if (PACKAGE / layer).is_dir()]
    assert "`trainer/` has thirteen rooms." in text and len(named) == 13


def test_a_public_name_means_one_thing() -> None:
    assert shared_names(_trees()) == {}


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
