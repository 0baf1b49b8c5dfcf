"""Promise: a known fault can be put into the package as it is now, and the test that is to see it exists."""

import ast
import functools
from pathlib import Path

import pytest

from tests.mutants.__main__ import HERE, Mutant, read_mutants
from tests.mutants.runner import ROOT


def _missing(mutant: Mutant) -> str:
    count = (ROOT / mutant.file).read_text().count(mutant.old)
    if count != 1:
        return f"{mutant.what}: its text stands {count} times in {mutant.file}"
    path, _, name = mutant.test.partition("::")
    if not (ROOT / path).exists():
        return f"{mutant.what}: no {path}"
    bare = name.partition("[")[0]
    return "" if not bare or bare in _functions(ROOT / path) else f"{mutant.what}: {path} has no {bare}"


@functools.cache
def _functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("file", sorted(HERE.glob("*.yaml")), ids=lambda file: file.stem)
def test_each_fault_can_be_made(file: Path) -> None:
    assert not list(filter(None, map(_missing, read_mutants(file))))
