"""Code objects reduced to what they compute, and the names that they read.

Left out are positions, line numbers, file names, docstrings and names of local variables.
"""

import ast
import dis
import hashlib
import re
import sys
from types import CodeType
from typing import Any, NamedTuple

# Version of the compiler and of the digests: under another one the same source has another digest.
COMPILER = f"{sys.implementation.name} {sys.version_info[0]}.{sys.version_info[1]}" + (
    " -O" if sys.flags.optimize else ""  # without asserts
)
COMPILER += ", digests 2"

# Flags that say how a function is called; the others say where it stands, or that it has a docstring.
_CALLED = 0x04 | 0x08 | 0x20 | 0x80 | 0x100 | 0x200
# The body of a class stores these; they hold names, lines and texts.
_ABOUT = {"__doc__", "__module__", "__qualname__", "__firstlineno__", "__static_attributes__"}
_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_NO_CODE = ("NOP", "EXTENDED_ARG")  # the first stands for a line without instructions


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
    scanner = _Scanner()
    text = scanner.text(code)
    return Scanned(digest_of(text), tuple(scanner.reads), tuple(scanner.imports))


def digest_of(text: str) -> str:
    """Returns the SHA-256 of a text, 16 hexadecimal digits."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def digest_of_module(source: bytes) -> str:
    """Returns the digest of a module's source: of its syntax, or of the bytes if it isn't Python."""
    try:
        return digest_of(ast.dump(ast.parse(source)))
    except (SyntaxError, ValueError):
        return digest_of(source.decode(errors="replace"))


def digest_of_statements(source: bytes) -> str:
    """Returns the digest of what a module does beside its definitions; "" if it does nothing else.

    Left out are functions, classes, imports, values given to names, texts, and what only a script runs.

    Raises:
        SyntaxError: If it isn't Python.
        ValueError: If it holds null bytes.
    """
    body = [ast.dump(node) for node in ast.parse(source).body if not _defines(node)]
    return digest_of("\n".join(body)) if body else ""


def _defines(node: ast.stmt) -> bool:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Import() | ast.ImportFrom():
            return True
        case ast.Assign():
            return all(isinstance(target, ast.Name | ast.Tuple) for target in node.targets)
        case ast.AnnAssign() | ast.Pass() | ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
            return True
        case ast.Expr():
            return isinstance(node.value, ast.Constant)
        case _:
            return False


class _Scanner:
    """Collects global names and imports of code objects."""

    def __init__(self) -> None:
        self.reads: dict[tuple[str, ...], None] = {}
        self.imports: dict[Import, None] = {}

    def text(self, code: CodeType) -> str:  # noqa: PLR0912  (one pass over the instructions)
        """Returns how a code object is called, its instructions, and what handles its exceptions."""
        bytecode = dis.Bytecode(code)
        arguments = code.co_argcount + code.co_kwonlyargcount + sum(bool(code.co_flags & n) for n in (4, 8))
        local = {name: number for number, name in enumerate(code.co_varnames[:arguments])}
        found, jumps, numbers = list[Any](), list[int](), dict[int, int]()
        chain, constants = tuple[str, ...](), list[Any]()  # the global that is read, and constants so far
        for one in bytecode:
            name, value = one.opname, one.argval
            numbers[one.offset] = len(found)
            if name in _NO_CODE:
                continue
            extends = chain and name in ("LOAD_ATTR", "LOAD_METHOD")
            if chain and not extends:
                self.reads[chain] = None
            chain = (*chain, value) if extends else (value,) if name in _GLOBALS else ()
            if name.startswith("STORE_") and value in _ABOUT and found:
                found.pop()  # the constant
            elif name == "MAKE_FUNCTION" and sys.version_info < (3, 11):
                found[-1] = (name, one.arg)  # in place of the qualified name, which says where it stands
            elif one.opcode in dis.hasconst:
                constants.append(value)
                found.append((name, self._constant(value)))
            elif one.opcode in dis.hasjrel or one.opcode in dis.hasjabs:
                jumps.append(len(found))
                found.append((name.replace("_NO_INTERRUPT", ""), value))
            elif "_FAST" in name:
                # Of two in one, if they stand on one line, each: line breaks count as none.
                names = value if isinstance(value, tuple) else (value,)
                places = [local.setdefault(each, len(local)) for each in names]
                found += zip(re.findall("LOAD|STORE|DELETE", name), places, strict=False)
            elif one.opcode in dis.hasname or one.opcode in dis.hasfree:
                found.append((name, value))
                if name == "IMPORT_NAME":
                    level, names = constants[-2:]
                    self.imports[Import(value, level or 0, tuple(names or ()))] = None
            else:
                found.append((name, one.arg))
        if chain:
            self.reads[chain] = None
        for at in jumps:
            found[at] = (found[at][0], numbers.get(found[at][1], len(found)))
        handlers = [
            (*(numbers.get(at, len(found)) for at in (one.start, one.end, one.target)), one.depth)
            for one in getattr(bytecode, "exception_entries", ())  # Python 3.11
        ]
        called = (code.co_flags & _CALLED, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
        named = (code.co_varnames[:arguments], code.co_freevars, code.co_cellvars)
        return repr((called, named, handlers, found))

    def _constant(self, value: object) -> str:
        if isinstance(value, CodeType):
            return digest_of(self.text(value))
        if isinstance(value, frozenset):  # in the order of this process's hashes
            return f"set {', '.join(sorted(map(self._constant, value)))}"
        if isinstance(value, tuple):
            return f"({', '.join(map(self._constant, value))})"
        return f"{type(value).__name__} {value!r}"
