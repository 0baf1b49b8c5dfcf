"""Modules beside a user's file (of a task or a hook), imported under names of their own.

`import net` in such a file, or in a module that it imports from its folder, gives the net.py there, as if the
file were run as a script. In `sys.modules` it is `trainer.config.beside.KEY.net`, with a new KEY each time
the file is run: so files net.py of two folders don't clash in one process, an edited one is read again,
and a class kept from an earlier run still imports its own modules. Another process finds the folder of a KEY
on `sys.path` by the hash in the KEY, so that loader workers can unpickle objects defined there.
"""

import builtins
import hashlib
import importlib
import itertools
import os
import sys
import sysconfig
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

# Last part of the name of the module that the user's file itself becomes.
MAIN = "trainer_custom_task"
__path__: list[str] = []  # lets `import trainer.config.beside.KEY` ask `_Finder`

_NUMBERS = itertools.count(1)
_by_key: "weakref.WeakValueDictionary[str, Beside]" = weakref.WeakValueDictionary()
_latest: dict[Path, "weakref.ref[Beside]"] = {}  # last run of each file
_open: dict[str, "Beside"] = {}  # by owner, see `open_folder`
_added: list[str] = []  # entries of `sys.path` that are ours, or of a file that was run here


class Beside:
    """Modules of a folder, as one run of one file imports them.

    Attributes:
        folder: The folder.
        name: Full name of the package that they are submodules of.
        modules: Loaded modules of Python source, by their full names.
        builtins: Builtins of each module, whose `__import__` looks in the folder first.
    """

    def __init__(self, folder: Path, key: str = "") -> None:
        """Registers the folder, under a new key if none is given."""
        key = key or f"{_hash(str(folder))}_{next(_NUMBERS)}"
        self.folder, self.name = folder, f"{__name__}.{key}"
        self.modules: dict[str, ModuleType] = {}
        self.builtins = {**vars(builtins), "__import__": self._import}
        self._found: dict[str, str | None] = {}
        _by_key[key] = self

    def run(self, path: Path) -> ModuleType:
        """Runs a file of the folder and returns it as a module; what the file raises isn't wrapped."""
        importlib.invalidate_caches()  # finders list a folder again only if its modification time has changed
        importlib.import_module(self.name)
        name = f"{self.name}.{MAIN}"
        spec = spec_from_loader(name, _Source(self, name, str(path)), origin=str(path))
        assert spec is not None
        spec.has_location = True
        sys.modules[name] = module = module_from_spec(spec)
        _Source(self, name, str(path)).exec_module(module)
        return module

    def file_of(self, top: str) -> str | None:
        """Returns the file of a top-level module if it is imported from the folder, else None."""
        if top not in self._found:
            self._found[top] = self._find(top)
        return self._found[top]

    def _find(self, top: str) -> str | None:
        spec = None if top == "trainer" else PathFinder.find_spec(top, [str(self.folder)])
        if spec is None:
            return None
        if spec.origin is not None:
            return spec.origin
        # A folder without __init__.py may hold data: a module of that name elsewhere comes first.
        return None if top in sys.modules or _elsewhere(top, self.folder) else str(self.folder / top)

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """Imports a module, as the `import` statements of modules in the folder do."""
        top = name.partition(".")[0]
        unpickles = fromlist == []  # only C code passes this; it then looks up the plain name in sys.modules
        file = None if level or unpickles else self.file_of(top)
        itself = file is not None and file == _absolute((globals or {}).get("__file__", ""))
        # The latter: a timm.py that imports the installed timm.
        if file is None or (itself and _elsewhere(top, self.folder)):
            module = __import__(name, globals, locals, fromlist or (), level)
            return self._importlib() if module is importlib else module
        with self._absent_by_plain_name():
            if fromlist:
                return __import__(f"{self.name}.{name}", globals, locals, fromlist)
            importlib.import_module(f"{self.name}.{name}")
            return sys.modules[f"{self.name}.{top}"]

    @contextmanager
    def _absent_by_plain_name(self) -> Iterator[None]:
        """Context manager that gives import errors the plain name of the missing module, for `except`."""
        try:
            yield
        except ModuleNotFoundError as error:
            if error.name and error.name.startswith(f"{self.name}."):
                error.name = error.name.removeprefix(f"{self.name}.")
                error.msg = error.msg.replace(f"{self.name}.", "")
            raise

    def _importlib(self) -> ModuleType:
        """Returns a copy of importlib whose `import_module` also looks beside the file first."""
        module = ModuleType("importlib")
        vars(module).update(vars(importlib), import_module=self._import_module)
        return module

    def _import_module(self, name: str, package: str | None = None) -> ModuleType:
        beside = not name.startswith(".") and self.file_of(name.partition(".")[0]) is not None
        with self._absent_by_plain_name():
            return importlib.import_module(f"{self.name}.{name}" if beside else name, package)

    def unlist(self) -> None:
        """Removes the modules from `sys.modules`; code that holds one of them can still import it."""
        for name in [one for one in sys.modules if one == self.name or one.startswith(f"{self.name}.")]:
            del sys.modules[name]
        globals().pop(self.name.rpartition(".")[2], None)


def run_file(path: Path, whose: str) -> tuple[Beside, ModuleType]:
    """Runs a file as a new module; what the file raises isn't wrapped.

    Args:
        path: The file.
        whose: Owner for whom its folder is opened, see `open_folder`.
    """
    if (before := _latest.get(path)) is not None and (own := before()) is not None:
        own.unlist()
    own = Beside(Path(_absolute(str(path.parent))))
    _latest[path] = weakref.ref(own)
    open_folder(own, whose)
    entries = list(sys.path)
    try:
        return own, own.run(path)
    finally:
        _added.extend(entry for entry in sys.path if entry not in entries)


def add_first(folder: str) -> None:
    """Puts a folder first on `sys.path`, until the end of `imports_kept`; nothing if it is there."""
    if folder not in sys.path:
        sys.path.insert(0, folder)
        _added.append(folder)


def open_folder(own: Beside, whose: str) -> None:
    """Lets modules of a folder also be imported by a name made at run time, and by other processes.

    Args:
        own: The folder's modules.
        whose: Owner of the folder, such as a task; another folder opened for the same owner is closed.
    """
    if (before := _open.pop(whose, None)) is not None and before is not own:
        _close(before)
    _open[whose] = own
    opened = list(_open.values())
    _drop(name for name, module in sys.modules.items() if _is_plain(name, module, opened))
    if str(own.folder) not in sys.path:
        sys.path.append(str(own.folder))  # last, so that imports of other code don't find its modules


def _close(own: Beside) -> None:
    """Removes a folder's modules from `sys.modules` by their plain names, and the folder from `sys.path`."""
    _drop(
        name for name, module in sys.modules.items() if _is_of(module, own) and not name.startswith(__name__)
    )
    if str(own.folder) in sys.path and not any(one.folder == own.folder for one in _open.values()):
        sys.path.remove(str(own.folder))


@contextmanager
def imports_kept() -> Iterator[None]:
    """Context manager that takes what was put on `sys.path` here off it again, and restores the open folders.

    That is what `add_first` and the files that were run put there; their modules are removed from
    `sys.modules`. What other threads do with `sys.path` stays.
    """
    path, opened, before = list(sys.path), dict(_open), len(_added)
    try:
        yield
    finally:
        for whose in [one for one in _open if _open[one] is not opened.get(one)]:
            _close(_open.pop(whose))
        _open.update(opened)
        # A package may have put a folder of its own there when it was imported, as setuptools does.
        installed = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("purelib", "platlib"))
        ours = {entry for entry in _added[before:] if entry not in path and not entry.startswith(installed)}
        del _added[before:]
        folders = {_absolute(entry) for entry in ours}
        _drop(name for name, module in sys.modules.items() if _found_in(module, folders))
        for entry in ours & {*sys.path}:
            sys.path.remove(entry)


def _drop(names: Iterable[str]) -> None:
    """Removes top-level modules and their submodules from `sys.modules`."""
    tops = {name.partition(".")[0] for name in names} - {"trainer"}
    for name in [one for one in sys.modules if one.partition(".")[0] in tops]:
        del sys.modules[name]


def _found_in(module: ModuleType, folders: set[str]) -> bool:
    """True if a top-level module lies in one of the folders."""
    name, file = getattr(module, "__name__", ""), getattr(module, "__file__", None)
    if "." in name or not isinstance(file, str):
        return False
    place = os.path.dirname(file)  # noqa: PTH120  (for each of a thousand modules)
    return place in folders or (hasattr(module, "__path__") and os.path.dirname(place) in folders)  # noqa: PTH120


def _is_of(module: ModuleType | None, own: Beside) -> bool:
    return str(getattr(module, "__name__", "")).startswith(f"{own.name}.")


def _is_plain(name: str, module: ModuleType, but: Sequence[Beside]) -> bool:
    """True if a module of a folder is in `sys.modules` by its plain name; False for folders of `but`."""
    ours = str(getattr(module, "__name__", "")).startswith(f"{__name__}.")
    return ours and not name.startswith(__name__) and not any(_is_of(module, own) for own in but)


def _elsewhere(top: str, folder: Path) -> bool:
    """True if a top-level module is built in, or found on `sys.path` outside of a folder."""
    others = [entry for entry in sys.path if _absolute(entry) != str(folder)]
    return top in sys.builtin_module_names or PathFinder.find_spec(top, others) is not None


def _absolute(entry: str) -> str:
    try:
        return os.path.abspath(entry)  # noqa: PTH100  (normalized, as a file's folder is)
    except OSError:  # the current folder was deleted
        return entry


def _hash(folder: str) -> str:
    """Returns the first part of a folder's KEY, a valid name."""
    return "m" + hashlib.sha256(os.fsencode(folder)).hexdigest()[:8]


class _Source(SourceFileLoader):
    """Loads a module of a folder from its source: cached bytecode may be of an older version."""

    def __init__(self, own: Beside, name: str, path: str) -> None:
        super().__init__(name, path)
        self._own = own

    def get_code(self, _: str) -> Any:
        return self.source_to_code(self.get_data(self.path), self.path)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = self._own.builtins
        self._own.modules[module.__name__] = module
        try:
            super().exec_module(module)
        except BaseException:
            self._own.modules.pop(module.__name__, None)
            raise


class _Loaded(Loader):
    """Loader that returns the module of another name, imported once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:  # noqa: ARG002
        own = _by_key.get(self._name.removeprefix(f"{__name__}.").partition(".")[0])
        known = None if own is None else own.modules.get(self._name)
        module = importlib.import_module(self._name) if known is None else known
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system replaced it


class _Finder:
    """Finder on `sys.meta_path`: of modules in folders by full name, in open folders by plain name, too."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(f"{__name__}."):
            return _plain(name)
        key, _, rest = name.removeprefix(f"{__name__}.").partition(".")
        own = _by_key.get(key) or _sent(key)
        if own is None:
            return None
        if not rest:
            package = ModuleSpec(name, None, is_package=True)
            package.submodule_search_locations = [str(own.folder)]
            return package
        if name in own.modules:
            return spec_from_loader(name, _Loaded(name))
        spec = PathFinder.find_spec(name, path)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Source(own, name, spec.loader.path)
        return spec


def _plain(name: str) -> ModuleSpec | None:
    """Finds an open folder's module by its plain name, for pickles and for imports by libraries."""
    top = name.partition(".")[0]
    for own in list(_open.values()):
        if top != name:
            if _is_of(sys.modules.get(top), own):
                return spec_from_loader(name, _Loaded(f"{own.name}.{name}"))
        elif own.file_of(top) is not None and not _elsewhere(top, own.folder):
            return spec_from_loader(name, _Loaded(f"{own.name}.{name}"))
    return None


_sent_here: dict[str, Beside] = {}  # keeps them alive: `_by_key` is weak


def _sent(key: str) -> Beside | None:
    """Returns the folder on `sys.path` with this KEY, which another process made, such as one in a pickle."""
    for entry in sys.path:
        folder = _absolute(entry)  # "" is the current folder
        if _hash(folder) == key.partition("_")[0]:
            _sent_here[key] = Beside(Path(folder), key)
            return _sent_here[key]
    return None


sys.meta_path.insert(0, _Finder)
