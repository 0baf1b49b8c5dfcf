"""Counts of a package: `python -m tests.docs.count [FOLDER...]`, by default of trainer and tests.

Lines of code are those with a token that is neither a comment nor of a docstring.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

_DEFINITIONS = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_LAYOUT = {getattr(tokenize, name) for name in ["COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER"]}


def code_lines(text: str) -> set[int]:
    """Numbers of the lines of code in a text."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    spans = [(one.start[0], one.end[0]) for one in tokens if one.type not in _LAYOUT]
    lines = {line for first, last in spans for line in range(first, last + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DEFINITIONS) and ast.get_docstring(node, clean=False) is not None:
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return lines


if __name__ == "__main__":
    for word in sys.argv[1:] or ["trainer", "tests"]:
        texts = [file.read_text() for file in Path(word).rglob("*.py")]
        lines = sum(len(text.splitlines()) for text in texts)
        code = sum(len(code_lines(text)) for text in texts)
        print(f"{word}: {len(texts):,} files, {lines:,} lines, {code:,} of code")
