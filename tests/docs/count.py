"""Counts of a package: `python -m tests.docs.count [FOLDER...]`, by default of trainer and tests.

Code lines are those with a token that is neither a comment nor of a docstring; comment lines hold a comment
alone; the rest is blank.
"""

import ast
import io
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_LAYOUT = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


class Counts(NamedTuple):
    """What is in some files."""

    files: int
    lines: int
    code: int
    doc: int
    comment: int


def count(files: Iterable[Path]) -> Counts:
    """Counts Python files."""
    lines = code = doc = comment = 0
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
    return Counts(len(files), lines, code, doc, comment)


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
        f"docstrings, {found.comment:,} of comments"
    )


if __name__ == "__main__":
    for word in sys.argv[1:] or ["trainer", "tests"]:
        print(_line(Path(word)))
