"""Identity of a custom task: the code of its class, the values that this code reads, and its attributes.

Two objects of equal identity train alike, as far as Python can tell. It is taken straight after `__init__`,
equally of a class that `fit` is given and of one in a file. An entry has a name that people know ("method
loss", "attribute weight", "global SCALE"), so that a difference can be named:

- code: functions of the user, by `trainer.tasks.bytecode`: methods of the class and of its bases, functions
  and classes that these read by a global name, and modules of the user that they import when they are called.
- values: attributes, closures, defaults, and globals that the code reads. Arrays by their hash.

What is installed counts by name and version. What has no stable value (locks, open files) is listed as
unknown. Places (the folder of the file, the current one, home) count as such, so that a task can move.
"""

import contextlib
import copyreg
import enum
import functools
import hashlib
import importlib.metadata
import inspect
import io
import os
import random
import sys
import threading
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path, PurePath
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
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

_SHOWN = 40  # characters of a value that is stored as it is; longer ones by their hash
_REDACTED = 4096  # characters of a text that is searched for secrets
_MOST = 200_000  # objects in one value
_MAPPED_BYTES = 64 << 20  # of a file that is mapped: larger ones count by some of their pages
_PAGES = 256
_PLAIN = {bool, int, float, complex, str, type(None)}
# What enum, abc and typing put into a class.
_ABOUT_CLASS = {"_abc_impl", "_is_protocol", "_is_runtime_protocol", "_member_map_", "_member_names_"} | {
    *("_value2member_map_", "_unhashable_values_", "_unhashable_values_map_", "_hashable_values_"),
    *("_member_type_", "_value_repr_", "_new_member_", "_use_args_", "_singles_mask_", "_boundary_"),
    *("_generate_next_value_", "_flag_mask_", "_all_bits_", "_inverted_", "_field_defaults", "_missing_"),
}
_ABOUT_MODULE = {"__name__", "__file__", "__doc__", "__builtins__", "__spec__", "__package__", "__loader__"}
# Recorded with the run already (`versions` in the manifest).
_KNOWN_VERSIONS = {"torch", "torchvision", "numpy", "PIL", "trainer"}
_OF_PROCESS = ("_compiled_call_impl", "_flat_weight_refs")  # attributes of torch's modules
# Objects of this process, or ones that reading would use up.
_UNSTABLE = (io.IOBase, threading.Thread, weakref.ref, Iterator)
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
    for name, value in _attributes_of(own):
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
        if not _is_installed_class(type(kind)):
            self._label(type(kind), "class", self._path(type(kind)))
        for base in kind.__mro__:
            if _is_installed_class(base):
                installed.append(f"{base.__module__}.{base.__qualname__}")
                self._package(base.__module__)
                continue
            self._statements(base.__module__)
            for name in sorted(vars(base), key=str):
                value = vars(base)[name]
                dunder = name.startswith("__") and name.endswith("__")
                if dunder and not (_is_method(value) and not _is_generated(base, value)):
                    continue
                if not (name in _ABOUT_CLASS or (name == "RECIPE" and not label)):
                    self._member(f"{prefix}{name}", value)
            fields: Mapping[str, Any] = vars(base).get("__dataclass_fields__", {})
            for name, field in fields.items():
                self.record(f"field {prefix}{name}", (field.default, field.default_factory, field.init))
            if isinstance(base, enum.EnumMeta):
                members = {name: one.value for name, one in vars(base)["_member_map_"].items()}
                self.record(f"members of {label or base.__name__}", members)
        self.values[f"installed bases of {label or 'the class'}"] = _short(", ".join(installed))

    def _member(self, name: str, value: Any) -> None:
        if isinstance(value, GetSetDescriptorType | MemberDescriptorType | enum.Enum):
            return
        kind, functions = "", {"": value}
        if isinstance(value, functools.cached_property):
            kind, functions = "property", {"": value.func}
        if isinstance(value, staticmethod | classmethod):
            kind, functions = type(value).__name__, {"": value.__func__}
        elif isinstance(value, property):
            kind = "property"
            functions = {"": value.fget, ".setter": value.fset, ".deleter": value.fdel}
        for end, function in functions.items():
            if isinstance(function, FunctionType):
                label = self._unused(f"method {name}{end}", self.code)
                if id(function) in self._labels:  # by another name
                    self.values[label] = self._labels[id(function)]
                    continue
                self._labels[id(function)] = label
                self._function(function, label)
                if kind:
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
            self.code[label] = f"{module}.{function.__code__.co_name}"
            self._package(module)
            inner = _unwrapped(function)
            if inner is not function:
                outer = self.code[label]
                if id(inner) in self._labels:
                    self.code[label] += f" of {self._labels[id(inner)]}"
                else:
                    self._labels[id(inner)] = label
                    self._function(inner, label)
                    self.code[label] = f"{outer} of {self.code[label]}"
            for name, value in _closure(function):
                if value is not inner and (type(value) in _PLAIN or _holds_own(value)):
                    self.record(f"closure {name} of {label}", value)
            return
        self._statements(module)
        scanned = scan(function.__code__)
        self.code[label] = scanned.digest
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        defaults = function.__defaults__ or ()
        for name, value in zip(names[len(names) - len(defaults) :], defaults, strict=True):
            self.record(f"default {name} of {label}", value)
        for name, value in (function.__kwdefaults__ or {}).items():
            self.record(f"default {name} of {label}", value)
        for name, value in _closure(function):
            self.record(f"closure {name} of {label}", value)
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
        wholes = [one for one in (module, *(f"{module}.{n}".lstrip(".") for n in wanted.names)) if one]
        if not wholes:
            return
        top = wholes[0].partition(".")[0]
        folders = [*filter(None, [folder_of(name)])]
        with contextlib.suppress(OSError):
            folders += (
                [] if top in sys.stdlib_module_names else [str(from_here(Path()).absolute()), *sys.path]
            )
        spec = None if top == "trainer" else PathFinder.find_spec(top, folders)
        places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or [])]
        found = next((Path(one) for one in places if one and Path(one).is_absolute()), None)
        if found is None or is_installed(str(found)):
            self._package(top)
            return
        root = found.parent if found.is_dir() or found.stem != "__init__" else found.parent.parent
        for one in wholes:
            for path, content in modules_of(root, one).items():
                if (label := f"module {path}") not in self.code:
                    self.code[label] = digest_of_module(content)

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
        if top in self._modules or top in _KNOWN_VERSIONS or top in sys.stdlib_module_names:
            return
        self._modules.add(top)
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
        if kind is str:
            return _short(self._text(value))
        if kind in _PLAIN or value is ... or value is NotImplemented:
            return repr(value)
        if isinstance(value, PurePath):
            return _short(self._text(str(value)))
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
            if text == place:
                text = name
            text = text.replace(place + os.sep, f"{name}/")
        return repr(redact_text(text) if len(text) <= _REDACTED else text)

    def _made(self, value: Any, kind: type) -> str:
        for kinds, make in _EXACT:
            if kind in kinds:
                return make(self, value)
        for kinds, make in _DERIVED:
            if isinstance(value, kinds):
                return make(self, value)
        if callable(value) and (name := self._callable(value, kind)):
            return name
        if isinstance(value, _UNSTABLE) and _is_installed(kind.__module__):
            return self._no_token()
        return self._object(value, kind)

    def _bytes(self, value: Any) -> str:
        return f"bytes {hashlib.sha256(value).hexdigest()}"

    def _set(self, value: Any) -> str:
        return f"{type(value).__name__} {', '.join(sorted(map(self._token, value)))}"

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
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        return f"{about} {_hash(data)}"

    def _function_token(self, value: FunctionType) -> str:
        if not _is_installed_function(value) or _has_own_code(value):
            return self._label(value, "function", self._path(value))
        return f"{value.__module__}.{value.__qualname__}"

    def _method(self, value: MethodType) -> str:
        return f"{self._token(value.__func__)} of {self._token(value.__self__)}"

    def _builtin(self, value: BuiltinFunctionType) -> str:
        owner = value.__self__
        about = owner.__name__ if isinstance(owner, ModuleType) else self._token(owner)
        return f"{value.__name__} of {about}"

    def _class_token(self, value: type) -> str:
        if not _is_installed_class(value):
            return self._label(value, "class", self._path(value))
        self._package(value.__module__)
        return f"{value.__module__}.{value.__qualname__}"

    def _module_token(self, value: ModuleType) -> str:
        if not _is_installed(value.__name__):
            return self._label(value, "module", _plain(value.__name__))
        self._package(value.__name__)
        return f"module {value.__name__}"

    def _partial(self, value: Any) -> str:
        parts = (type(value), value.func, value.args, value.keywords)
        return " ".join(map(self._token, parts))

    def _static(self, value: Any) -> str:
        return f"{type(value).__name__} {self._token(value.__func__)}"

    def _code(self, value: CodeType) -> str:
        return scan(value).digest

    def _member_token(self, value: enum.Enum) -> str:
        return f"{self._token(type(value))}.{value.name} {self._token(value.value)}"

    def _scalar(self, value: Any) -> str:
        return f"{value.dtype} {value.item()!r}"

    def _callable(self, value: Any, kind: type) -> str:
        """Returns the token of a callable that wraps a function, or isn't written in Python; else ""."""
        inner = inspect.getattr_static(value, "__wrapped__", None)
        if isinstance(inner, FunctionType) and not isinstance(value, nn.Module):  # lru_cache
            return f"{self._token(kind)} of {self._token(inner)}"
        if not hasattr(value, "__dict__") and isinstance(name := getattr(value, "__qualname__", None), str):
            return f"{getattr(value, '__module__', '')}.{name}"
        return ""

    def _torch_generator(self, value: torch.Generator) -> str:
        return f"torch.Generator {_tensor(value.get_state())}"

    def _python_generator(self, value: random.Random) -> str:
        return f"random {digest_of(repr(value.getstate()))}"

    def _tensor(self, value: torch.Tensor) -> str:
        return _tensor(value)

    def _generator(self, value: Any) -> str:
        bits = value if isinstance(value, np.random.BitGenerator) else getattr(value, "bit_generator", None)
        entropy = getattr(getattr(bits, "seed_seq", None), "entropy", 0)
        if isinstance(entropy, int) and entropy >> 64:  # the system's, as nobody gave a seed
            return self._no_token()
        state = value.get_state() if bits is None else bits.state
        return f"{type(value).__name__} {self._token(state)}"

    def _object(self, value: Any, kind: type) -> str:
        """Returns the token of an object by its attributes.

        One of an installed class with a lock or a file in it, such as a log writer, is a handle: its names
        and times aren't compared, either.
        """
        missed = self._missed
        token = self._object_token(value, kind)
        if self._missed > missed and _is_installed_class(kind) and not isinstance(value, nn.Module):
            return f"{self._token(kind)} ?"
        return token

    def _contained(self, value: Any) -> str:
        """Returns the token of what a derived container or number holds, by Python's own methods; else ""."""
        if isinstance(value, dict):
            default = value.default_factory if isinstance(value, defaultdict) else None
            return f"{self._mapping(dict(dict.items(value)))} {self._token(default)}"
        for many in (list, tuple, set, frozenset):
            if isinstance(value, many):
                return self._token(many(many.__iter__(value)))  # type: ignore[arg-type]
        for one in (str, bytes, int, float, complex):
            if isinstance(value, one):
                return one.__repr__(value)
        return ""

    def _object_token(self, value: Any, kind: type) -> str:
        about = self._token(kind)
        if isinstance(value, nn.Module):
            kept = {n: v for n, v in vars(value).items() if "_hook" not in n and n not in _OF_PROCESS}
            return f"{about} {self._mapping(kept)}"
        if callable(getattr(kind, "fingerprint", None)) and hasattr(kind, "__len__"):
            return f"{about} {value.fingerprint()}"  # a data set says which data it is
        own = {name for base in kind.__mro__ if base is not object for name in vars(base)}
        pickled = own & {"__reduce__", "__reduce_ex__", "__getstate__"} or kind in copyreg.dispatch_table
        contained = self._contained(value)
        if contained or not pickled:
            more = self._mapping(dict(_attributes_of(value)))
            if contained or more != "{}" or hasattr(value, "__dict__") or "__slots__" in own:
                return f"{about} {contained} {more}"
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


_Make = Callable[[_Walk, Any], str]
_EXACT: tuple[tuple[tuple[type, ...], _Make], ...] = (
    ((list, tuple, deque), _Walk._sequence),
    ((set, frozenset), _Walk._set),
    ((dict, OrderedDict, MappingProxyType), _Walk._mapping),
    ((bytes, bytearray, memoryview), _Walk._bytes),
)
_DERIVED: tuple[tuple[tuple[type, ...], _Make], ...] = (
    ((np.ndarray,), _Walk._array),
    ((np.generic,), _Walk._scalar),
    ((torch.Tensor,), _Walk._tensor),
    ((FunctionType,), _Walk._function_token),
    ((MethodType,), _Walk._method),
    ((BuiltinFunctionType,), _Walk._builtin),
    ((type,), _Walk._class_token),
    ((ModuleType,), _Walk._module_token),
    ((functools.partial,), _Walk._partial),
    ((staticmethod, classmethod), _Walk._static),
    ((CodeType,), _Walk._code),
    ((enum.Enum,), _Walk._member_token),
    ((np.random.Generator, np.random.BitGenerator, np.random.RandomState), _Walk._generator),
    ((random.Random,), _Walk._python_generator),
    ((torch.Generator,), _Walk._torch_generator),
)


def _attributes_of(thing: object) -> list[tuple[str, Any]]:
    """Returns an object's attributes, sorted: of its `__dict__` and its slots, without properties."""
    found = dict(getattr(thing, "__dict__", None) or {})
    for base in (one for one in type(thing).__mro__ if "__slots__" in vars(one)):
        for name, slot in vars(base).items():
            if isinstance(slot, MemberDescriptorType) and name not in found:
                with contextlib.suppress(AttributeError):
                    found[name] = slot.__get__(thing)
    return sorted(found.items(), key=lambda pair: str(pair[0]))


def _closure(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__":  # of super(), the class itself
            with contextlib.suppress(ValueError):  # not set yet
                yield name, cell.cell_contents


def _tensor(value: torch.Tensor) -> str:
    about = f"tensor {value.dtype} {tuple(value.shape)}" + " trained" * value.requires_grad
    if value.is_meta or nn.parameter.is_lazy(value):
        return f"{about} without values"
    dense = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
    plain = dense.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    # A copy: numpy() would fix the size of the user's tensor for good.
    return f"{about} {_hash(plain.clone().view(torch.uint8).numpy())}"


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


def _is_generated(kind: type, value: object) -> bool:
    """True for what `dataclass` makes of a class's fields, which count themselves."""
    if not isinstance(value, FunctionType) or "__dataclass_fields__" not in vars(kind):
        return False
    code = _unwrapped(value).__code__
    name = getattr(code, "co_qualname", "__create_fn__")  # Python 3.11
    return code.co_filename == "<string>" and name.startswith("__create_fn__")


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


def _has_own_code(function: FunctionType) -> bool:
    """True for an installed function that calls one of the user's, as of a decorator."""
    return not _is_installed_function(_unwrapped(function)) or any(
        _holds_own(value) for _, value in _closure(function)
    )


def _holds_own(value: object) -> bool:
    """True for a function of the user, and for a list or dict of such functions."""
    if isinstance(value, FunctionType):
        return not _is_installed_function(value)
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(isinstance(one, FunctionType) and not _is_installed_function(one) for one in inside)


def _unwrapped(function: FunctionType) -> FunctionType:
    """Returns the function of the user that an installed one stands for, by `__wrapped__`; else itself."""
    inner, seen = function, {id(function)}
    while _is_installed_function(inner):
        inner = vars(inner).get("__wrapped__")  # type: ignore[assignment]
        if not isinstance(inner, FunctionType) or id(inner) in seen:
            return function
        seen.add(id(inner))
    return inner


def _is_installed_class(kind: type) -> bool:
    """True for a class of an installed module; False for one that it makes for the user, as `exec` does."""
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
    return top == "trainer" or (is_installed(file) if file else top in sys.stdlib_module_names)
