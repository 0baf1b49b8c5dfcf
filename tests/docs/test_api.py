"""Promise: notebooks, documents and the example of a task take public names only, and each is there."""

import ast
import re
from pathlib import Path

import pytest

import trainer
from tests.docs.test_notebooks import NOTEBOOKS, code_of

ROOT = Path(__file__).parents[2]
PUBLIC = {name for names in trainer.PUBLIC.values() for name in names}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = [ROOT / "trainer/tasks/example.py", *sorted((ROOT / "examples").rglob("*.py"))]


def python_of(path: Path) -> str:
    if path.suffix == ".ipynb":
        return code_of(path)
    text = path.read_text()
    return text if path.suffix == ".py" else "\n".join(re.findall(r"```python\n(.*?)```", text, re.S))


def taken(code: str) -> set[str]:
    """What Python takes of the package: public names as they are, all else with its module."""
    names = set()
    for line in re.findall(r"^\s*((?:from|import) +trainer\b.*)$", code, re.M):
        for node in ast.parse(line.strip()).body:
            if isinstance(node, ast.ImportFrom):
                module = str(node.module).removeprefix("trainer").removeprefix(".")
                names |= {f"{module}.{one.name}".removeprefix(".") for one in node.names}
            elif isinstance(node, ast.Import):
                names |= {one.name for one in node.names if one.name != "trainer"}
    return names


@pytest.mark.parametrize("path", [*PAGES, *NOTEBOOKS, *EXAMPLES], ids=lambda one: str(one.relative_to(ROOT)))
def test_it_takes_public_names_only(path: Path) -> None:
    assert taken(python_of(path)) <= PUBLIC


def test_each_name_is_there_and_known_to_type_checkers() -> None:
    for names in trainer.PUBLIC.values():
        for name, module in names.items():
            assert getattr(trainer, name).__module__ == f"trainer.{module}" or name == "Sink"
    tree = ast.parse((ROOT / "trainer/__init__.py").read_text())
    (typed,) = (node for node in tree.body if isinstance(node, ast.If))
    parts = [node for node in typed.body if isinstance(node, ast.ImportFrom)]
    told = {one.name: str(node.module) for node in parts for one in node.names}
    public = {
        name: f"trainer.{module}" for names in trainer.PUBLIC.values() for name, module in names.items()
    }
    assert told == public
