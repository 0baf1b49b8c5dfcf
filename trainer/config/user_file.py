"""A user's file (of a task or a hook), run as a script is: by its stem, from its folder, first on `sys.path`.

Unlike a script's, the folder comes there after torch and the trainer were imported, and gives no module that
Python has or that is installed: a file with such a name, or that imports one from its folder, is refused. Two
open folders give no module of one name. Modules are compiled from their source: bytecode may be of a version
of the same size and time.
"""

# ruff: noqa: PTH100, PTH118  (abspath normalizes and follows no link; names of a thousand modules are compared)
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from hashlib import sha256
from importlib import import_module, invalidate_caches, machinery
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple, cast

from trainer.config.task_file import modules_beside, modules_of, source_bytes
from trainer.errors import BadInputError

_INSTALLED = tuple(
    f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


class _Folder(NamedTuple):
    """Folder that is open.

    Attributes:
        files: Modules that its files became when they were run.
        sources: Texts of these, and of the modules of the folder that they import, by path.
        names: Top-level names of all these modules.
        aside: What `sys.modules` had by these names.
        others: Names of what it had besides.
        entries: What was put on `sys.path`.
    """

    files: dict[str, ModuleType]
    sources: dict[str, bytes]
    names: set[str]
    aside: dict[str, ModuleType]
    others: set[str]
    entries: list[str]


_open: dict[str, _Folder] = {}  # by absolute path


def run_file(path: Path, alone: bool = False) -> ModuleType:
    """Runs a file as a module, once until its text, or that of a module that it imports, changes.

    Args:
        path: The file.
        alone: Whether other folders are closed before, as for another task.

    Raises:
        BadInputError: If the file, or a module beside it, has a name that is taken.
        BaseException: What the file raises.
    """
    path = Path(os.path.abspath(path))
    folder, beside = str(path.parent), modules_beside(path)
    name = path.stem if "." not in path.stem else f"task_{sha256(os.fsencode(path)).hexdigest()[:8]}"
    sources = {path.name: source_bytes(path), **beside}
    if (before := _open.get(folder)) and any(before.sources.get(n, one) != one for n, one in sources.items()):
        _close(folder)
    elif before and name in before.files:
        return before.files[name]
    for other in [one for one in _open if alone and one != folder]:
        _close(other)
    opened = _opened(folder, sources, {name, *map(_top, beside)}, fresh=True)
    entries, loader = list(sys.path), _Source(name, str(path))
    module = module_from_spec(cast(machinery.ModuleSpec, spec_from_file_location(name, path, loader=loader)))
    sys.modules[name] = opened.files[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        _close(folder)
        raise
    # A package may have put a folder of its own there when it was imported, as setuptools does.
    opened.entries.extend(one for one in sys.path if one not in entries and not is_installed(one))
    return module


@contextmanager
def run_again(path: Path) -> Iterator[ModuleType]:
    """Context manager that runs a file anew; at its end the modules of before are back."""
    folder = os.path.abspath(path.parent)
    before = _open.pop(folder, None)
    try:
        yield run_file(path)
    finally:
        _close(folder)
        if before is not None:
            _open[folder] = before


def import_from(folder: Path, name: str) -> ModuleType:
    """Imports a module that may lie in a folder, as `python -m` does there.

    Raises:
        BadInputError: If it, or a module of the folder that it imports, has a name that is taken.
        BaseException: What the module raises.
    """
    sources = modules_of(folder, name)
    _opened(os.path.abspath(folder), sources, set(map(_top, sources)))
    return import_module(name)


@contextmanager
def folders_closed() -> Iterator[None]:
    """Context manager that closes all folders at its end."""
    try:
        yield
    finally:
        for folder in reversed([*_open]):
            _close(folder)


def shadowing() -> str:
    """Returns a file that a new process would import in place of a module that this one has; or ""."""
    files = [
        (one, each) for one in _open for end in ("*.py", "*/__init__.py") for each in Path(one).glob(end)
    ]
    for folder, file in sorted(files):
        name = _top(file.relative_to(folder).as_posix())
        if name in sys.modules and _is_taken(name, folder) and _file(sys.modules[name]) != str(file):
            return str(file)
    return ""


def folder_of(module: str) -> str:
    """Returns the open folder of a user's file, or of a module that it imported from there; else ""."""
    loader = getattr(getattr(sys.modules.get(module), "__spec__", None), "loader", None)
    found = [one for one in _open if isinstance(loader, _Source) and _within(loader.path, one)]
    return max(found, key=len, default="")


def is_file(module: str) -> bool:
    """True for a module that a user's file became when it was run."""
    return any(module in one.files for one in _open.values())


def is_importable(module: str) -> bool:
    """False for a module that another process can't import: a notebook, a file with a dot in its name."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return (
        file is not None if module == "__main__" else not is_file(module) or Path(file or "").stem == module
    )


@lru_cache(maxsize=4096)
def is_installed(path: str) -> bool:
    """True for a file or folder of Python, or of an installed package."""
    installed = {"site-packages", "dist-packages"} & {*Path(path).parts}
    return bool(installed) or f"{path}{os.sep}".startswith(_INSTALLED)


def _opened(folder: str, sources: Mapping[str, bytes], names: set[str], fresh: bool = False) -> _Folder:
    """Opens a folder for modules; `fresh` sets modules of the same names aside."""
    for name in sorted(names):
        if _is_taken(name, folder):
            raise BadInputError(
                f"{folder}: the module '{name}' there has the name of one of Python, of an installed package "
                "or of the trainer; rename it"
            )
        for other in [one for one in _open if one != folder and name in _open[one].names]:
            raise BadInputError(
                f"{folder} and {other} both have a module '{name}'; rename one, or move both into one folder"
            )
    opened = _open.setdefault(folder, _Folder({}, {}, set(), {}, {*sys.modules}, []))
    for full in [*opened.others] if fresh else []:
        if _top(full) in names - opened.names and full in sys.modules:
            opened.aside[full] = sys.modules.pop(full)
            opened.others.remove(full)
    opened.sources.update(sources)
    opened.names.update(names)
    if sys.path[:1] != [folder] and not opened.entries:
        sys.path.insert(0, folder)
        opened.entries.append(folder)
    invalidate_caches()
    return opened


def _close(folder: str) -> None:
    """Takes a folder off `sys.path`, and its modules out of `sys.modules`; what was there before is back."""
    if (opened := _open.pop(folder, None)) is None:
        return
    for entry in opened.entries:
        with suppress(ValueError):
            sys.path.remove(entry)
    for name, module in [*sys.modules.items()]:
        ours = name not in opened.others and _top(name) != "trainer" and not is_installed(_file(module))
        if ours and any(_within(_file(module), os.path.abspath(one)) for one in (folder, *opened.entries)):
            del sys.modules[name]
    sys.modules.update(opened.aside)
    invalidate_caches()


_STRAY = ("example", "examples", "test", "tests")  # which packages leave beside themselves by mistake


def _is_taken(name: str, folder: str) -> bool:
    """True if Python, an installed package outside of the folder or the trainer has a top-level name."""
    if name in sys.stdlib_module_names or name in ("trainer", "__main__"):
        return True
    if name in _STRAY:
        return False
    spec = machinery.PathFinder.find_spec(
        name, [one for one in sys.path if is_installed(one) and one != folder]
    )
    return spec is not None and spec.origin is not None


def _top(module: str) -> str:
    """Returns the top-level name of a module, given by its name or its path."""
    return module.partition("/")[0].partition(".")[0]


def _file(module: object) -> str:
    """Returns a module's file, or the first folder of a package without one."""
    return str(getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", None) or ()), ""))


def _within(path: str, folder: str) -> bool:
    return f"{path}{os.sep}".startswith(os.path.join(folder, ""))


class _Source(machinery.SourceFileLoader):
    """Loader that neither reads nor writes bytecode."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


class _Finder:
    """Finder of what open folders were opened for; what else lies there comes after all of `sys.path`."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, _: ModuleType | None = None
    ) -> machinery.ModuleSpec | None:
        folder = next((one for one in _open if _top(name) in _open[one].names), "")
        if path is not None and not folder:
            return None
        where = [folder] if folder else sorted(sys.path, key=_open.__contains__)
        if (spec := machinery.PathFinder.find_spec(name, where if path is None else path)) is None:
            return None
        if type(spec.loader) is machinery.SourceFileLoader and folder:
            spec.loader = _Source(name, spec.loader.path)
        if spec.loader is None:  # else it would be looked for in all of `sys.path` later
            spec.submodule_search_locations = [*(spec.submodule_search_locations or ())]
        return spec


sys.meta_path.insert(sys.meta_path.index(machinery.PathFinder), _Finder)
