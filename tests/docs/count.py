"""Counts of a package: `python -m tests.docs.count [FOLDER...]`, by default of trainer and tests.

Code lines are those with a token that is neither a comment nor of a docstring; comment lines hold a comment
alone; the rest is blank. A name stands in two modules if both define it for others: a function, class or
constant of the module without an underscore, but for the names that every command or page has.
"""

import ast
import io
import statistics
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

_OF_EACH = {"main", "add_parser", "render", "RECIPE"}
_DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_LAYOUT = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


class Counts(NamedTuple):
    """What is in some files.

    Attributes:
        shared: Public names that two modules or more define, with these modules.
        lengths: Lines of each function.
    """

    files: int
    lines: int
    code: int
    doc: int
    comment: int
    classes: int
    functions: int
    lengths: list[int]
    shared: dict[str, list[str]]


def count(files: Iterable[Path]) -> Counts:
    """Counts Python files."""
    lines = code = doc = comment = classes = 0
    lengths, trees = list[int](), dict[str, ast.Module]()
    files = sorted(files)
    for file in files:
        text = file.read_text()
        tree = ast.parse(text)
        docs = _docstrings(tree)
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
        written = {
            line
            for token in tokens
            if token.type not in (tokenize.COMMENT, *_LAYOUT)
            for line in range(token.start[0], token.end[0] + 1)
        } - docs
        lines, code, doc = lines + len(text.splitlines()), code + len(written), doc + len(docs)
        comment += len({token.start[0] for token in tokens if token.type == tokenize.COMMENT} - written)
        for node in ast.walk(tree):
            classes += isinstance(node, ast.ClassDef)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lengths.append((node.end_lineno or 0) - node.lineno + 1)
        trees[str(file)] = tree
    return Counts(len(files), lines, code, doc, comment, classes, len(lengths), lengths, shared_names(trees))


def shared_names(trees: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """Public names that two modules or more define, with these modules."""
    names = defaultdict[str, list[str]](list)
    for file, tree in trees.items():
        for name in defined(tree):
            if not name.startswith("_") and name not in _OF_EACH:
                names[name].append(file)
    return {name: where for name, where in names.items() if len(where) > 1}


def defined(tree: ast.Module) -> set[str]:
    """Names of functions, classes and constants that a module defines."""
    names = {node.name for node in tree.body if isinstance(node, _DEFINITIONS)}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def _docstrings(tree: ast.Module) -> set[int]:
    """Lines of docstrings."""
    found = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | _DEFINITIONS) and ast.get_docstring(node, clean=False) is not None:
            found |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return found


def _line(folder: Path) -> str:
    found = count(folder.rglob("*.py"))
    return (
        f"{folder}: {found.files:,} files, {found.lines:,} lines: {found.code:,} of code, {found.doc:,} of "
        f"docstrings, {found.comment:,} of comments; {found.classes:,} classes; {found.functions:,} "
        f"functions, median {statistics.median(found.lengths or [0]):g} lines, longest "
        f"{max(found.lengths, default=0)}; {len(found.shared)} names in two modules or more"
    )


if __name__ == "__main__":
    for word in sys.argv[1:] or ["trainer", "tests"]:
        print(_line(Path(word)))
