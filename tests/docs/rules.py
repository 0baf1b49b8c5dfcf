"""What tests hold too much of: `python -m tests.docs.rules [FILE...]` shows it, `--write` lowers the table.

A sentence is a text of five words or more that a test expects of the program: in an `assert` (but for
what the assert hands to a function that is no search), in `match=`, in `refused(...)`, in `refusal(...)`; or
it has a name that these read: of a table (`parametrize`) or of an assignment. A private use is a name with an
underscore that the package defines, of anything but `self` and `cls`: attribute, import, patch.
"""

import ast
import functools
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_suffix(".json")
LONG = 5
Table = dict[str, dict[str, int]]

_WORD = re.compile(r"\(?[A-Za-z]+(?:['-][A-Za-z]+)*[.,;:!?)]*")
_PRIVATE = re.compile(r"_(?!_)\w*[a-zA-Z]\w*")
_SEARCHES = {
    *("search", "match", "fullmatch", "findall", "named", "refused", "refusal", "startswith", "endswith"),
    *("count", "index", "partition", "removeprefix", "all", "any", "sorted", "set", "list", "tuple"),
}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Found(NamedTuple):
    """Lines of a file of tests."""

    sentences: list[int]
    private: list[int]


def find(tree: ast.Module, private: frozenset[str]) -> Found:
    """What stands in a file; `private` are names that the package defines with an underscore."""
    return Found(sorted(text.lineno for text in _sentences(tree)), sorted(_private(tree, private)))


def is_long(text: str) -> bool:
    """Whether a text has five words or more: letters between spaces."""
    return sum(_WORD.fullmatch(word) is not None for word in text.split()) >= LONG


@functools.cache
def defined() -> frozenset[str]:
    """Names with one underscore that the package defines: functions, classes, constants, attributes."""
    names = set[str]()
    for file in (ROOT / "trainer").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    names.add(name)
                case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                    names.add(name)
    return frozenset(name for name in names if _PRIVATE.fullmatch(name))


def _sentences(tree: ast.Module) -> set[ast.expr]:
    """Sentences that a file expects, each once."""
    classes = [one for one in tree.body if isinstance(one, ast.ClassDef)]
    scopes: list[ast.Module | ast.ClassDef] = [tree, *classes]
    functions = [node for one in scopes for node in one.body if isinstance(node, _Function)]
    rest = [one for one in tree.body if not isinstance(one, _Function | ast.ClassDef)]
    outside = [node for one in rest for node in ast.walk(one)]
    assigned = dict(_bound(outside))
    found = _read(outside, assigned.items())
    for function in functions:
        nodes = list(ast.walk(function))
        found |= _read(nodes, [*_bound(nodes), *_parametrized(function, assigned), *assigned.items()])
    return found


def _read(nodes: list[ast.AST], values: Iterable[tuple[str, ast.expr]]) -> set[ast.expr]:
    """Sentences that some code expects, itself or by names, which have these values."""
    expected = [part for one in _expected(nodes) for part in _parts(one)]
    read = {part.id for part in expected if isinstance(part, ast.Name)}
    named = [part for name, value in values if name in read for part in _parts(value)]
    return {part for part in (*expected, *named) if _is_sentence(part)}


def _expected(nodes: list[ast.AST]) -> Iterator[ast.expr]:
    for node in nodes:
        match node:
            case ast.Assert(test=test):
                yield test
            case ast.keyword(arg="match", value=value):
                yield value
            case ast.Call(func=ast.Name(id="refused" | "refusal")):
                yield node


def _parts(node: ast.AST) -> Iterator[ast.expr]:
    """An expression and its parts, but for what is handed to a function that is no search."""
    if isinstance(node, ast.expr):
        yield node
    children = [] if isinstance(node, ast.JoinedStr) else list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        children = [node.func, *(node.args if name in _SEARCHES else [])]
    for child in children:
        yield from _parts(child)


def _is_sentence(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=str(text)):
            return is_long(text)
        case ast.JoinedStr(values=parts):
            texts = [str(part.value) if isinstance(part, ast.Constant) else "0" for part in parts]
            return is_long("".join(texts))
    return False


def _bound(nodes: list[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    """Names that code assigns, with their values."""
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield name, value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                yield name, value


def _parametrized(function: _Function, known: dict[str, ast.expr]) -> Iterator[tuple[str, ast.expr]]:
    """Parameters of a test with the values that its tables give them."""
    for one in function.decorator_list:
        match one:
            case ast.Call(args=[ast.Constant(value=str(text)), table, *_]):
                yield from _columns([part.strip() for part in text.split(",")], table, known)
            case ast.Call(args=[ast.Tuple() | ast.List() as names, table, *_]):
                texts = [str(part.value) if isinstance(part, ast.Constant) else "" for part in names.elts]
                yield from _columns(texts, table, known)


def _columns(names: list[str], table: ast.expr, known: dict[str, ast.expr]) -> Iterator[tuple[str, ast.expr]]:
    for row in _rows(table, known):
        match row:
            case ast.Call(func=ast.Attribute(attr="param"), args=cells):
                pass
            case ast.Tuple(elts=cells) | ast.List(elts=cells) if len(names) > 1:
                pass
            case _:
                cells = [row]
        yield from zip(names, cells, strict=False)


def _rows(table: ast.expr, known: dict[str, ast.expr]) -> Iterator[ast.expr]:
    """Rows of a table, also of one that has a name."""
    match table:
        case ast.Tuple(elts=rows) | ast.List(elts=rows) | ast.Set(elts=rows):
            for row in rows:
                yield from _rows(row.value, known) if isinstance(row, ast.Starred) else [row]
        case ast.Dict(keys=keys, values=values):
            yield from (ast.Tuple(elts=[key, value]) for key, value in zip(keys, values, strict=True) if key)
        case ast.Name(id=name) if name in known:
            yield from _rows(known[name], {})
        case ast.Call(func=ast.Attribute(value=whole, attr="items")):
            yield from _rows(whole, known)


def _private(tree: ast.Module, names: frozenset[str]) -> Iterator[int]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name, lineno=line) if name in names:
                yield line
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] == "trainer":
                yield from (alias.lineno for alias in node.names if alias.name in names)
            case ast.Call(func=ast.Attribute(attr="setattr" | "delattr" | "patch" | "object")):
                texts = [str(one.value) for one in node.args if isinstance(one, ast.Constant)]
                yield from (node.lineno for text in texts if text.rpartition(".")[2] in names)


def files() -> list[Path]:
    """Files of tests."""
    return sorted((ROOT / "tests").rglob("*.py"))


def counts() -> Table:
    """Counts of each file that has any."""
    found = {str(file.relative_to(ROOT)): find(ast.parse(file.read_text()), defined()) for file in files()}
    counted = {file: (len(one.sentences), len(one.private)) for file, one in found.items()}
    return _without_none(
        {file: dict(zip(Found._fields, both, strict=True)) for file, both in counted.items()}
    )


def lowered(table: Table, now: Table) -> Table:
    """A table with the smaller number of both; a file that isn't in the table stays out."""
    least: Table = {}
    for file, kinds in table.items():
        found = now.get(file, {})
        least[file] = {kind: min(number, found.get(kind, 0)) for kind, number in kinds.items()}
    return _without_none(least)


def _without_none(table: Table) -> Table:
    kept = {file: {kind: number for kind, number in kinds.items() if number} for file, kinds in table.items()}
    return {file: kinds for file, kinds in kept.items() if kinds}


def main(words: list[str]) -> None:
    """Lowers the table, or shows what files have."""
    if words == ["--write"]:
        table = lowered(json.loads(TABLE.read_text()), counts())
        rows = ",\n".join(f"  {json.dumps(file)}: {json.dumps(kinds)}" for file, kinds in table.items())
        TABLE.write_text(f"{{\n{rows}\n}}\n")
        return
    for file in [Path(word).resolve() for word in words] or files():
        for kind, lines in find(ast.parse(file.read_text()), defined())._asdict().items():
            for line in lines:
                print(f"{file.relative_to(ROOT)}:{line}: {kind}")


if __name__ == "__main__":
    main(sys.argv[1:])
