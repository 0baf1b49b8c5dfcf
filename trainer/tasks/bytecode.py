"""Code objects reduced to what they compute, and the names that they read.

Left out are positions, line numbers, file names, docstrings and names of local variables. Imports only the
standard library.
"""

import ast
import dis
import hashlib
import sys
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any, NamedTuple

# Version of the compiler: the same source gives other instructions and constants under another one.
COMPILER = f"{sys.implementation.name} {sys.version_info[0]}.{sys.version_info[1]}" + (
    " -O" if sys.flags.optimize else ""  # without asserts
)
DIGITS = 16

# Flags that say how a function is called; the others say where it stands, or that it has a docstring.
_CALLED = 0x04 | 0x08 | 0x20 | 0x80 | 0x100 | 0x200
# The body of a class stores these; they hold names, lines and texts.
_ABOUT = {"__doc__", "__module__", "__qualname__", "__firstlineno__", "__static_attributes__"}
_IMPORTERS = {"import_module", "__import__"}
_CONSTANTS, _NAMES = frozenset(dis.hasconst), frozenset(dis.hasname)
_JUMPS = frozenset([*dis.hasjrel, *dis.hasjabs])
_EXTENDED, _CACHE, _CACHED = dis.EXTENDED_ARG, 0, sys.version_info >= (3, 11)
_ONE_LOCAL = ("LOAD_FAST", "STORE_FAST", "LOAD_FAST_BORROW")
# Lowest bits of the argument that aren't part of a name's number.
_SHIFTS = {
    "LOAD_GLOBAL": 1 if sys.version_info >= (3, 11) else 0,
    "LOAD_ATTR": 1 if sys.version_info >= (3, 12) else 0,
    "LOAD_SUPER_ATTR": 2,
}


class Import(NamedTuple):
    """Import that a function makes when it is called; its level is that of `__import__`."""

    module: str
    level: int
    names: tuple[str, ...]


class Scanned(NamedTuple):
    """A code object, with the code that is nested in it.

    Attributes:
        digest: SHA-256 of its instructions, names and constants, 16 hexadecimal digits.
        reads: Global names that it reads, each followed by the attributes that it takes of it at once.
        imports: Imports that it makes.
    """

    digest: str
    reads: tuple[tuple[str, ...], ...]
    imports: tuple[Import, ...]


def scan(code: CodeType) -> Scanned:
    """Reduces a code object to its digest and the names that it reads."""
    reads, imports = dict[tuple[str, ...], None](), dict[Import, None]()
    text = _text(code, reads, imports)
    return Scanned(digest_of(text), tuple(reads), tuple(imports))


def digest_of(text: str) -> str:
    """Returns the SHA-256 of a text, 16 hexadecimal digits."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]


def digest_of_module(source: bytes) -> str:
    """Returns the digest of a module's source: of its code, or of the bytes if it can't be compiled."""
    try:
        return scan(compile(source, "", "exec", dont_inherit=True)).digest
    except (SyntaxError, ValueError):
        return hashlib.sha256(source).hexdigest()[:DIGITS]


def digest_of_statements(source: bytes) -> str:
    """Returns the digest of what a module does beside its definitions; "" if it does nothing else.

    Left out are functions, classes, imports, values given to names, texts, and what only a script runs.

    Raises:
        SyntaxError: If it isn't Python.
        ValueError: If it holds null bytes.
    """
    body = [node for node in ast.parse(source).body if not _defines(node)]
    if not body:
        return ""
    return scan(compile(ast.Module(body, []), "", "exec", dont_inherit=True)).digest


def _defines(node: ast.stmt) -> bool:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Import() | ast.ImportFrom():
            return True
        case ast.Assign():
            return all(isinstance(target, ast.Name | ast.Tuple) for target in node.targets)
        case ast.AnnAssign() | ast.Pass():
            return True
        case ast.Expr():
            return isinstance(node.value, ast.Constant)
        case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
            return True
        case _:
            return False


def _text(  # noqa: PLR0912  (one pass over the instructions)
    code: CodeType, reads: dict[tuple[str, ...], None], imports: dict[Import, None]
) -> str:
    arguments = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
    found = list[Any]()
    chain, constants = [""], [None, None]  # the global name that is read, and the last two constants
    numbers, steps = dict[int, int](), [*_instructions(code.co_code)]  # of `found`, by offsets
    jumps = list[tuple[int, int]]()
    for begin, operation, number, after in steps:
        numbers[begin] = len(found)
        name = dis.opname[operation]
        if operation in _CONSTANTS and number < len(code.co_consts):
            value = code.co_consts[number]
            constants = [constants[1], value]
            found.append((name, _constant(value, reads, imports)))
        elif operation in _NAMES and (at := number >> (shift := _SHIFTS.get(name, 0))) < len(code.co_names):
            word = code.co_names[at]
            if name.startswith("STORE_") and word in _ABOUT and found:
                found.pop()  # the constant
                continue
            found.append((name, word, number & ((1 << shift) - 1)))
            if name in ("LOAD_ATTR", "LOAD_METHOD") and chain[0]:
                chain.append(word)
                continue
            _close(chain, reads)
            if name in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
                chain = [word]
            elif name == "IMPORT_NAME":
                level, names = constants
                imports[Import(word, level or 0, tuple(names or ()))] = None
            continue
        elif operation in _JUMPS:
            far = -number if "BACKWARD" in name else number
            jumps.append((len(found), 2 * number if operation in dis.hasjabs else after + 2 * far))
            found.append(name.replace("_NO_INTERRUPT", ""))
        elif name.count("_FAST") == 2 and sys.version_info >= (3, 13):
            # Two instructions, if they stand on one line; so line breaks count as none.
            first, second = name.split("_FAST_") if "BORROW" not in name else ("LOAD", "LOAD")
            found += [(first, number >> 4), (second.removesuffix("_FAST"), number & 15)]
        elif name in _ONE_LOCAL:
            found.append((name.partition("_FAST")[0], number))
        elif name != "NOP":  # it stands for a line without instructions
            if name == "LOAD_SMALL_INT":
                constants = [constants[1], number]  # type: ignore[list-item]
            if name == "MAKE_FUNCTION" and sys.version_info < (3, 11):
                found.pop()  # the qualified name, which says where it stands
            found.append((name, number))
        _close(chain, reads)
    _close(chain, reads)
    numbers[len(code.co_code)] = len(found)
    for at, target in jumps:
        found[at] = (found[at], numbers.get(target, target))
    if _IMPORTERS & {*code.co_names}:
        texts = (one for one in code.co_consts[1:] if isinstance(one, str) and one.strip("."))
        imports.update(dict.fromkeys(Import(one, 0, ()) for one in texts))
    head = (
        code.co_flags & _CALLED,
        (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount),
        code.co_varnames[:arguments],
        code.co_freevars,
        code.co_cellvars,
        [tuple(numbers.get(at, at) for at in places) + rest for places, rest in _handlers(code)],
    )
    return repr((head, found))


def _close(chain: list[str], reads: dict[tuple[str, ...], None]) -> None:
    if chain[0]:
        reads[tuple(chain)] = None
    chain[:] = [""]


def _instructions(raw: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Yields instructions: offset, operation, argument, and the offset that a jump counts from."""
    more, begin = 0, None
    for at in range(0, len(raw), 2):
        operation, number = raw[at], raw[at + 1]
        begin = at if begin is None else begin
        if operation == _EXTENDED:
            more = (more | number) << 8
        elif operation == _CACHE and _CACHED:
            begin = None
        else:
            after = at + 2
            while _CACHED and after < len(raw) and raw[after] == _CACHE:
                after += 2
            yield begin, operation, number | more, after
            more, begin = 0, None


def _handlers(code: CodeType) -> Iterator[tuple[tuple[int, int, int], tuple[int]]]:
    """Yields the exception table's offsets (begin, end, target), with depth; none before Python 3.11."""
    numbers, value = list[int](), 0
    for byte in getattr(code, "co_exceptiontable", b""):
        value = value << 6 | byte & 63
        if not byte & 64:
            numbers.append(value)
            value = 0
    for begin, length, target, depth in zip(*[iter(numbers)] * 4, strict=True):
        yield (2 * begin, 2 * (begin + length), 2 * target), (depth,)


def _constant(value: object, reads: dict[tuple[str, ...], None], imports: dict[Import, None]) -> str:
    if isinstance(value, CodeType):
        return digest_of(_text(value, reads, imports))
    if isinstance(value, frozenset):  # in the order of this process's hashes
        return f"set {_sorted(_constant(one, reads, imports) for one in value)}"
    if isinstance(value, tuple):
        return f"({', '.join(_constant(one, reads, imports) for one in value)})"
    return f"{type(value).__name__} {value!r}"


def _sorted(texts: Iterable[str]) -> str:
    return ", ".join(sorted(texts))
