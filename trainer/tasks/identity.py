"""Identity of a custom task: the code of its class, the values that this code reads, and its attributes.

Two objects of equal identity train alike, as far as Python can tell. It is taken straight after `__init__`,
equally of a class that `fit` is given and of one in a file. An entry has a name that people know ("method
loss", "attribute weight", "global SCALE"), so that a difference can be named:

- code: functions of the user, by `trainer.tasks.bytecode`: methods of the class and of its bases, functions
  and classes that these read by a global name, and modules of the user that they import when they are called.
- values: attributes, closures, defaults, and globals that the code reads. Arrays by their hash, other objects
  by what `pickle` would take of them.

What is installed counts by name and version. What has no stable value (locks, open files) is listed as
unknown. Places (the folder of the file, the current one, home) count as such, so that a task can move.
"""

import contextlib
import copyreg
import functools
import hashlib
import importlib.metadata
import inspect
import os
import sys
from collections import OrderedDict, deque
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path, PurePath
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from trainer.config.redact import REDACTED, is_secret, redact_text
from trainer.config.task_file import modules_of
from trainer.config.user_file import folder_of, is_file, is_installed
from trainer.host.here import from_here
from trainer.tasks.bytecode import (
    COMPILER,
    Import,
    digest_of,
    digest_of_module,
    digest_of_statements,
    scan,
)
from trainer.tasks.values import bytes_of

_SHOWN = 40  # characters of a value that is stored as it is; longer ones by their hash
_REDACTED = 4096  # characters of a text that is searched for secrets
_MOST = 200_000  # objects in one value
_MAPPED_BYTES = 64 << 20  # of a file that is mapped: larger ones count by some of their pages
_PAGES = 256
_PLAIN = {bool, int, float, complex, str, type(None)}
# What abc and typing put into a class.
_ABOUT_CLASS = {"_abc_impl", "_is_protocol", "_is_runtime_protocol"}
_ABOUT_MODULE = {"__name__", "__file__", "__doc__", "__builtins__", "__spec__", "__package__", "__loader__"}
# Recorded with the run already (`versions` in the manifest).
_KNOWN_VERSIONS = {"torch", "torchvision", "numpy", "PIL", "trainer"}
_FROM_PYTHON = 1 << 9  # flag of classes that aren't static ones of C, as a generator's
_OF_PROCESS = ("_compiled_call_impl", "_flat_weight_refs")  # attributes of torch's modules
# Modules that give their name to classes which they make for others.
_MAKERS = ("builtins", "types", "abc", "enum", "collections", "dataclasses", "typing")


class Identity(NamedTuple):
    """Identity of a task.

    Attributes:
        compiler: Version of Python's compiler: code is comparable for equal ones only.
        code: Digests of code, by name.
        values: Values, or their digests ("#…"), by name.
        unknown: Names of values that aren't compared, as they, or parts of them, have no stable value.
    """

    compiler: str
    code: dict[str, str]
    values: dict[str, str]
    unknown: tuple[str, ...]


def identity_of(own: object) -> Identity:
    """Returns the identity of a task's object, straight after its `__init__`."""
    walk = _Walk(own)
    for name, value in sorted(getattr(own, "__dict__", {}).items()):
        cached = isinstance(inspect.getattr_static(type(own), name, None), functools.cached_property)
        if name != "RECIPE" and not cached:
            walk.record(f"attribute {name}", value)
    walk.follow()
    return Identity(COMPILER, walk.code, walk.values, tuple(walk.unknown))


class _Walk:
    """One walk over all that a class reaches.

    Attributes:
        code: See `Identity`.
        values: See `Identity`.
        unknown: Names of values that aren't compared, in the order in which they were found.
    """

    def __init__(self, own: object) -> None:
        kind = type(own)
        self.code: dict[str, str] = {}
        self.values: dict[str, str] = {}
        self.unknown: dict[str, None] = {}
        self._home = kind.__module__
        self._places = _places(_file_of(kind.__module__))
        self._labels: dict[int, str] = {id(kind): "task"}  # of functions, classes and modules
        self._left: deque[tuple[Any, str]] = deque([(kind, "")])
        self._tokens: dict[int, str] = {id(own): "the task"}
        self._kept: list[object] = [own]  # so that no id is given twice
        self._above: list[int] = []  # containers and objects around the value
        self._entry, self._count, self._missed = "", 0, 0
        self._modules: set[str] = set()

    def follow(self) -> None:
        """Walks over all functions, classes and modules that were found, until there are no more."""
        while self._left:
            thing, label = self._left.popleft()
            try:
                if isinstance(thing, type):
                    self._class(thing, label)
                elif isinstance(thing, ModuleType):
                    for name in sorted(vars(thing)):
                        if not name.startswith("__"):
                            self._named(f"{label}.{name}", vars(thing)[name])
                else:
                    self._function(thing, label)
            except Exception:  # of metaclasses and descriptors
                self.unknown[label or "the class"] = None

    def record(self, name: str, value: object) -> None:
        """Stores a value under a name; as unknown if it can't be read."""
        if name in self.values:
            return
        self._entry, self._count, self._above = name, 0, []
        try:
            token = self._token(value)
        except Exception:  # of the user's properties and methods, or too deep
            token = self._no_token()
        hidden = isinstance(value, str) and is_secret(name.split()[1].rpartition(".")[2])
        shown = REDACTED if hidden else redact_text(token)
        self.values[name] = shown if len(shown) <= _SHOWN or shown[0] == "#" else _short(token)

    # --- functions, classes, modules ---

    def _label(self, thing: Any, kind: str, name: str) -> str:
        """Returns the name of a function, class or module, which will be walked over, too."""
        if id(thing) not in self._labels:
            label, number = f"{kind} {name}", 2
            while label in self._labels.values():
                label, number = f"{kind} {name} {number}", number + 1
            self._labels[id(thing)] = label
            self._kept.append(thing)
            self._left.append((thing, label if kind == "function" else name))
        return self._labels[id(thing)]

    def _path(self, thing: Any) -> str:
        """Returns the name of a function or class, with its module if that isn't the task's."""
        module = getattr(thing, "__module__", None) or ""
        name = str(getattr(thing, "__qualname__", type(thing).__name__)).rpartition("<locals>.")[2]
        return name if module == self._home else f"{_plain(module)}.{name}".lstrip(".")

    def _class(self, kind: type, label: str) -> None:
        """Walks over a class and its bases."""
        prefix, installed = f"{label}." if label else "", list[str]()
        for base in kind.__mro__:
            if _is_installed_class(base):
                installed.append(f"{base.__module__}.{base.__qualname__}")
                self._package(base.__module__)
                continue
            self._statements(base.__module__)
            for name, value in sorted(vars(base).items()):
                # Names such as __dict__ and enum's _member_map_ are Python's, but for methods.
                theirs = name.startswith("_") and name.endswith("_") and not _is_method(value)
                if not (theirs or name in _ABOUT_CLASS or (name in ("RECIPE", "hooks") and not label)):
                    self._member(f"{prefix}{name}", value)
        self.values[f"installed bases of {label or 'the class'}"] = _short(", ".join(installed))

    def _member(self, name: str, value: Any) -> None:
        kind, functions = type(value).__name__, {"": value}
        if isinstance(value, functools.cached_property):
            kind, functions = "property", {"": value.func}
        elif isinstance(value, staticmethod | classmethod):
            functions = {"": value.__func__}
        elif isinstance(value, property):
            functions = {"": value.fget, ".setter": value.fset, ".deleter": value.fdel}
        for end, function in functions.items():
            if isinstance(function, FunctionType):
                label = self._unused(f"method {name}{end}", self.code)
                if id(function) in self._labels:  # by another name
                    self.values[label] = self._labels[id(function)]
                    continue
                self._labels[id(function)] = label
                self._function(function, label)
                self.code[label] = f"{kind} {self.code[label]}"
            elif function is not None:
                self.record(self._unused(f"class attribute {name}{end}", self.values), function)

    def _unused(self, label: str, there: Mapping[str, str]) -> str:
        """Returns a name for what a derived class has again."""
        while label in there or label in self.values:
            label += " (inherited)"
        return label

    def _function(self, function: FunctionType, label: str) -> None:
        """Walks over a function; of an installed one, such as a decorator's, over the one that it calls."""
        module = function.__globals__.get("__name__", "")
        if _is_installed(module):
            self._package(module)
            self.code[label] = f"{module}.{function.__code__.co_name}"
            if (inner := _unwrapped(function)) is not function:
                self.code[label] += f" of {self._label(inner, 'function', self._path(inner))}"
            return
        self._statements(module)
        scanned = scan(function.__code__)
        self.code[label] = scanned.digest
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        defaults = function.__defaults__ or ()
        given = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
        for name, value in {**given, **(function.__kwdefaults__ or {})}.items():
            self.record(f"default {name} of {label}", value)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not set yet
                if name != "__class__":  # of super(), the class itself
                    self.record(f"closure {name} of {label}", cell.cell_contents)
        for name, value in sorted(vars(function).items()):
            self.record(f"attribute {name} of {label}", value)
        for chain in scanned.reads:
            self._read(function.__globals__, chain)
        for one in scanned.imports:
            self._late(function.__globals__, one)

    def _read(self, namespace: Mapping[str, Any], chain: tuple[str, ...]) -> None:
        """Looks a global name up, and in modules of the user the names after it."""
        if chain[0] not in namespace or chain[0] in _ABOUT_MODULE:
            return
        module = namespace.get("__name__", "")
        path, value = chain[0], namespace[chain[0]]
        for name in chain[1:]:
            own = isinstance(value, ModuleType) and not _is_installed(value.__name__)
            if not own or name not in vars(value):
                break
            path, value = f"{path}.{name}", vars(value)[name]
        self._named(path if module == self._home else f"{_plain(module)}.{path}".lstrip("."), value)

    def _named(self, path: str, value: Any) -> None:
        if isinstance(value, FunctionType) and not _is_installed_function(value):
            label, wanted = self._label(value, "function", path), f"function {path}"
        elif isinstance(value, type) and not _is_installed_class(value):
            label, wanted = self._label(value, "class", path), f"class {path}"
        else:
            self.record(f"global {path}", value)
            return
        if label != wanted:
            self.values[f"global {path}"] = label

    def _late(self, namespace: Mapping[str, Any], wanted: Import) -> None:
        """Takes in modules of the user that a function imports when it is called, without running them."""
        name, module = namespace.get("__name__", ""), wanted.module
        if wanted.level:
            package = str(namespace.get("__package__") or "").split(".")
            module = ".".join([*package[: len(package) + 1 - wanted.level], *filter(None, [module])])
        top = module.partition(".")[0]
        if not top or top in sys.stdlib_module_names or top == "trainer":
            return
        spec = PathFinder.find_spec(
            top, [*filter(None, [folder_of(name)]), str(from_here(Path()).absolute()), *sys.path]
        )
        places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or [])]
        found = next((Path(one) for one in places if one and Path(one).is_absolute()), None)
        if found is None or is_installed(str(found)):
            self._package(top)
            return
        root = found.parent if found.is_dir() or found.stem != "__init__" else found.parent.parent
        for one in (module, *(f"{module}.{each}" for each in wanted.names)):
            for path, content in modules_of(root, one).items():
                self.code.setdefault(f"module {path}", digest_of_module(content))

    def _statements(self, module: str) -> None:
        """Takes in what a file that was run for the task does beside its definitions."""
        if module in self._modules or not folder_of(module):
            return
        self._modules.add(module)
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            if digest := digest_of_statements(Path(_file_of(module)).read_bytes()):
                self.code[f"statements of {_plain(module) or 'the file'}"] = digest

    def _package(self, module: str) -> None:
        top = module.partition(".")[0]
        if {top, f"package {top}"} & {*_KNOWN_VERSIONS, *sys.stdlib_module_names, *self.values}:
            return
        version = getattr(sys.modules.get(top), "__version__", None)
        with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError):
            version = importlib.metadata.version(top)
        if isinstance(version, str):
            self.values[f"package {top}"] = version

    # --- values ---

    def _no_token(self) -> str:
        self._missed += 1
        self.unknown[self._entry] = None
        return "?"

    def _token(self, value: Any) -> str:
        """Returns a short text that is equal for equal values, in any process."""
        kind = type(value)
        if kind is str or isinstance(value, PurePath):
            return _short(self._text(str(value)))
        if kind in _PLAIN or value is ... or value is NotImplemented:
            return repr(value)
        if id(value) in self._tokens:
            return self._tokens[id(value)]
        if id(value) in self._above:  # a circle
            return f"^{len(self._above) - self._above.index(id(value))}"
        self._count += 1
        if self._count > _MOST:
            raise RecursionError("too many objects")
        self._above.append(id(value))
        try:
            token = _short(self._made(value, kind))
        finally:
            self._above.pop()
        self._tokens[id(value)] = token
        self._kept.append(value)
        return token

    def _text(self, text: str) -> str:
        for place, name in self._places:
            text = name if text == place else text.replace(place + os.sep, f"{name}/")
        return repr(redact_text(text) if len(text) <= _REDACTED else text)

    def _made(self, value: Any, kind: type) -> str:  # noqa: PLR0911  (a kind of values each)
        if kind in (list, tuple, deque):
            return self._sequence(value)
        if isinstance(value, set | frozenset):
            return f"{self._token(kind)} {', '.join(sorted(map(self._token, value)))}"
        if kind in (dict, OrderedDict, MappingProxyType):
            return self._mapping(value)
        if kind in (bytes, bytearray, memoryview):
            return f"bytes {hashlib.sha256(value).hexdigest()}"
        if isinstance(value, np.ndarray):
            return self._array(value)
        if isinstance(value, np.generic):
            return f"{value.dtype} {value.item()!r}"
        if isinstance(value, torch.Tensor):
            return _tensor(value)
        if isinstance(value, FunctionType | type | ModuleType):
            return self._code_token(value)
        inner = inspect.getattr_static(value, "__wrapped__", None)
        if isinstance(inner, FunctionType) and not isinstance(value, nn.Module):  # lru_cache
            return f"{self._token(kind)} of {self._token(inner)}"
        missed = self._missed
        token = self._object(value, kind)
        # One of an installed class with a lock or a file in it, such as a log writer, is a handle: its names
        # and times aren't compared, either.
        handle = self._missed > missed and _is_installed_class(kind) and not isinstance(value, nn.Module)
        return f"{self._token(kind)} ?" if handle else token

    def _sequence(self, value: Any) -> str:
        name = type(value).__name__
        if {*map(type, value)} <= _PLAIN:  # quick, as it may be a million of names
            text = repr([*value])
            for place, shown in self._places:
                text = text.replace(place + os.sep, f"{shown}/")
            return f"{name} {text}" if name != "list" else text
        return f"{name} [{', '.join(map(self._token, value))}]"

    def _mapping(self, value: Mapping[Any, Any]) -> str:
        pairs = (
            (self._token(key), REDACTED if isinstance(one, str) and is_secret(str(key)) else self._token(one))
            for key, one in value.items()
        )
        return f"{{{', '.join(f'{key}: {one}' for key, one in sorted(pairs))}}}"

    def _array(self, value: np.ndarray[Any, Any]) -> str:
        if isinstance(value, np.ma.MaskedArray):
            return f"masked {self._array(value.data)} {self._array(np.ma.getmaskarray(value))}"
        about = f"array {value.dtype.descr if value.dtype.names else value.dtype.str} {value.shape}"
        if value.dtype.hasobject:
            return f"{about} {self._token(value.tolist())}"
        value = np.asarray(value)
        if value.nbytes > _MAPPED_BYTES and _is_mapped(value):
            # Data, most likely: as in its fingerprint, some of it stands for all.
            value = value.reshape(-1)[np.linspace(0, value.size - 1, _PAGES, dtype=np.int64)]
        return f"{about} {_hash(np.ascontiguousarray(value).reshape(-1).view(np.uint8))}"

    def _code_token(self, value: Any) -> str:
        """Returns the label of a function, class or module of the user, the name of an installed one."""
        if isinstance(value, FunctionType):
            if not _is_installed_function(_unwrapped(value)):
                return self._label(value, "function", self._path(value))
            return f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, type):
            if not _is_installed_class(value):
                return self._label(value, "class", self._path(value))
            self._package(value.__module__)
            return f"{value.__module__}.{value.__qualname__}"
        if not _is_installed(value.__name__):
            return self._label(value, "module", _plain(value.__name__))
        self._package(value.__name__)
        return f"module {value.__name__}"

    def _object(self, value: Any, kind: type) -> str:
        """Returns the token of an object by its class and what `pickle` would store of it."""
        about = self._token(kind)
        if isinstance(value, nn.Module):
            kept = {n: v for n, v in vars(value).items() if "_hook" not in n and n not in _OF_PROCESS}
            return f"{about} {self._mapping(kept)}"
        if callable(getattr(kind, "fingerprint", None)) and hasattr(kind, "__len__"):
            return f"{about} {value.fingerprint()}"  # a data set says which data it is
        try:
            reduce = copyreg.dispatch_table.get(kind)
            reduced: Any = reduce(value) if reduce else value.__reduce_ex__(4)
        except Exception:
            return f"{about} {self._no_token()}"
        if isinstance(reduced, str):
            return f"{about} {reduced}"
        make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        parts = (make, arguments, state, [*(items or ())], dict(pairs or ()))
        return f"{about} {' '.join(map(self._token, parts))}"


def _tensor(value: torch.Tensor) -> str:
    about = f"tensor {value.dtype} {tuple(value.shape)}" + " trained" * value.requires_grad
    if value.is_meta or nn.parameter.is_lazy(value):
        return f"{about} without values"
    return f"{about} {_hash(bytes_of(value))}"


def _hash(data: np.ndarray[Any, Any]) -> str:
    return hashlib.sha256(data.data).hexdigest()


def _short(token: str) -> str:
    return token if len(token) <= _SHOWN else f"#{digest_of(token)}"


def _is_mapped(value: Any) -> bool:
    while value is not None and not isinstance(value, np.memmap):
        value = getattr(value, "base", None)
    return value is not None


def _is_method(value: object) -> bool:
    return isinstance(value, FunctionType | staticmethod | classmethod | property)


def _places(file: str) -> list[tuple[str, str]]:
    """Returns folders with the names that stand for them, the longest first."""
    found = {}
    with contextlib.suppress(OSError, RuntimeError):
        found[str(Path.home())] = "~"
    with contextlib.suppress(OSError):
        if file:
            found[str(Path(file).absolute().parent.parent)] = ".."
        found[str(from_here(Path()).absolute())] = "."
        if file:
            found[str(Path(file).absolute().parent)] = "."
    kept = ((place, name) for place, name in found.items() if len(place) > 1)
    return sorted(kept, key=lambda pair: -len(pair[0]))


def _plain(module: str) -> str:
    """Returns a module's name as the user writes it; "" for a task's file and for a script."""
    return "" if module == "__main__" or is_file(module) else module


def _file_of(module: str) -> str:
    return str(getattr(sys.modules.get(module), "__file__", None) or "")


def _is_installed_function(function: Any) -> bool:
    return _is_installed(getattr(function, "__globals__", {}).get("__name__", ""))


def _unwrapped(function: FunctionType) -> FunctionType:
    """Returns the function of the user that an installed one stands for, by `__wrapped__`; else itself."""
    inner: Any = function
    with contextlib.suppress(ValueError):  # a circle
        inner = inspect.unwrap(function, stop=lambda one: not _is_installed_function(one))
    return inner if isinstance(inner, FunctionType) and not _is_installed_function(inner) else function


def _is_installed_class(kind: type) -> bool:
    """True for a class of an installed module; False for one that it makes for the user, as `exec` does."""
    if not kind.__flags__ & _FROM_PYTHON:
        return True
    if not _is_installed(kind.__module__):
        return False
    made = kind.__module__ in _MAKERS and (
        kind.__module__ == "builtins" or "<locals>" not in kind.__qualname__
    )
    return not made or inspect.getattr_static(sys.modules[kind.__module__], kind.__name__, None) is kind


def _is_installed(module: str) -> bool:
    """True for a module of Python, of a package in site-packages, or of this one."""
    top = module.partition(".")[0]
    if not module or module == "__main__" or is_file(module):
        return False
    file = _file_of(module) or _file_of(top)
    if top == "trainer" or top.startswith("_cython"):  # which Cython says of its functions
        return True
    return is_installed(file) if file else top in sys.stdlib_module_names
