"""Mutants that nobody thought of: one operator, number or statement of a function, changed.

Which ones are drawn depends on the code alone: the name of each is hashed, and each part of the package takes
its smallest hashes. A change of one function leaves the mutants of the others as they were.
"""

import ast
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

# Files by part, and how many mutants of each: what the bits of a run and its data depend on, and the rest.
PARTS: Mapping[str, tuple[tuple[str, ...], int]] = {
    "step": (("trainer/train/*.py", "trainer/distributed/*.py"), 50),
    "plan": (("trainer/data/sampling/*.py", "trainer/data/*.py", "trainer/rng.py"), 50),
    "checkpoint": (("trainer/checkpoint/*.py",), 50),
    "readers": (("trainer/data/formats/*.py", "trainer/data/remote/*.py"), 50),
    "elsewhere": (("trainer/**/*.py",), 100),
}
_COMPARE: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq},
    **{ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
}
_CALCULATE: Mapping[type[ast.operator], type[ast.operator]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add},
    **{ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.FloorDiv},
}
_LEFT_OUT = ast.Raise | ast.Assert | ast.JoinedStr | ast.arguments | ast.Import | ast.ImportFrom


class Generated(NamedTuple):
    """A mutant: lines `first` to `last` of `file`, from 1, become `text`. `what` shows it, `key` names it."""

    key: str
    what: str
    file: str
    first: int
    last: int
    text: str


def generate(root: Path) -> list[Generated]:
    """Draws the mutants of the package that stands in `root`."""
    drawn = dict[str, Generated]()
    for globs, count in PARTS.values():
        files = sorted({file for glob in globs for file in root.glob(glob)})
        found = [one for file in files for one in _of_file(file.relative_to(root), file.read_text())]
        fresh = [one for one in found if one.key not in drawn]
        fresh.sort(key=lambda one: hashlib.sha256(one.key.encode()).digest())
        drawn |= {one.key: one for one in fresh[:count]}
    return list(drawn.values())


def _of_file(name: Path, source: str) -> Iterator[Generated]:
    lines, seen = source.splitlines(keepends=True), Counter[str]()
    for function, node in _in_functions(ast.parse(source)):
        for new in _changes(node):
            first, last = node.lineno, node.end_lineno or node.lineno
            head = lines[first - 1].encode()[: node.col_offset].decode()
            tail = lines[last - 1].encode()[node.end_col_offset :].decode()
            old = "".join(lines[first - 1 : last]).removeprefix(head).removesuffix(tail)
            what = f"{function}: {' '.join(old.split())} -> {new}"
            seen[what] += 1
            yield Generated(f"{name}:{what}:{seen[what]}", what, str(name), first, last, head + new + tail)


def _in_functions(
    tree: ast.AST, name: str = "", inside: bool = False
) -> Iterator[tuple[str, ast.expr | ast.stmt]]:
    """Expressions and statements of functions; not their messages, defaults and annotations."""
    for child in ast.iter_child_nodes(tree):
        match child:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                body, within = ast.Module(child.body, []), not isinstance(child, ast.ClassDef)
                yield from _in_functions(body, f"{name}.{child.name}".strip("."), within)
            case child if isinstance(child, _LEFT_OUT):
                pass
            case ast.AnnAssign() if child.value is not None:
                yield from _in_functions(ast.Expression(child.value), name, inside)
            case ast.AnnAssign():
                pass
            case _:
                if inside and isinstance(child, ast.expr | ast.stmt):
                    yield name, child
                yield from _in_functions(child, name, inside)


def _changes(node: ast.expr | ast.stmt) -> Iterator[str]:
    """Texts that can stand in a node's place."""
    match node:
        case ast.Compare(ops=[one]) if type(one) in _COMPARE:
            yield ast.unparse(ast.Compare(node.left, [_COMPARE[type(one)]()], node.comparators)).join("()")
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield ast.unparse(ast.BoolOp(other, node.values)).join("()")
        case ast.BinOp() if type(node.op) in _CALCULATE and not isinstance(node.left, ast.JoinedStr):
            yield ast.unparse(ast.BinOp(node.left, _CALCULATE[type(node.op)](), node.right)).join("()")
        case ast.UnaryOp(op=ast.Not()):
            yield ast.unparse(node.operand).join("()")
        case ast.Constant(value=bool() as value):
            yield str(not value)
        case ast.Constant(value=int() as value):
            yield str(value + 1)
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "pass"
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "return None"
        case ast.Continue() | ast.Break():
            yield "pass"
        case _:
            pass
