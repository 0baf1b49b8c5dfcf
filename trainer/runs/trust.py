"""Trust in Python code that a run names: decides whether it may run here. Imports no torch.

Code that the command line names (a task's file, hooks, sinks) is the user's own. Code that a run folder names
may be a stranger's. It runs with --trust, or if this user began or trained that run with the same code: a
mark in the manifest proves it (an HMAC with a key in the user's configuration folder).
"""

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import stat
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config.recipe import Recipe
from trainer.config.recipe_file import override
from trainer.config.task_file import hash_of_sources, modules_beside, modules_of, source_bytes
from trainer.config.tasks import TASKS
from trainer.config.training import is_place
from trainer.errors import BadInputError
from trainer.host.files import open_regular_file
from trainer.host.here import from_here
from trainer.observe.console import warn
from trainer.observe.text import plain
from trainer.runs.folder import MANIFEST, read_json

_KEY_BYTES = 32
_MARKS = 8  # at most, of as many homes: a pod has a new one at each start
_DIGITS = 16  # of a hash, in a message
_INSTALLED = "installed"
_PLACE = "checkpoint.folder"  # not code, but needs the same trust: a run writes and removes files there


class Code(NamedTuple):
    """Python code that a recipe names.

    Attributes:
        key: Key of the recipe: task, hooks.use, log.to, or checkpoint.folder.
        place: Value of the key, such as file.py:NAME.
        name: Name of the class or function; empty for a task.
        hash: SHA-256 of the file and of the modules beside it that it imports; "installed" for a module of
            an installed package, and empty where there is no such file.
        beside: Paths of these modules.
    """

    key: str
    place: str
    name: str
    hash: str
    beside: tuple[str, ...] = ()

    @property
    def sign(self) -> str:
        """Text that a mark is made of; the path isn't part of it, so that the file may move."""
        return " ".join([self.key, self.name or "-", self.hash])

    def __str__(self) -> str:
        """Describes the code for people."""
        if self.key == _PLACE:
            return plain(f"{self.key}={self.place}", 500)
        others = f", with {', '.join(self.beside)}" if self.beside else ""
        what = (
            f"sha256 {self.hash[:_DIGITS]}" if self.hash not in ("", _INSTALLED) else self.hash or "not found"
        )
        return plain(f"{self.key}={self.place} ({what}{others})", 500)


def own_code(recipe: Recipe) -> list[Code]:
    """Returns the Python code that a recipe names and that isn't the trainer's, and `checkpoint.folder`."""
    found = []
    if (folder := recipe.checkpoint.folder) is not None:
        found.append(Code(_PLACE, str(folder), "", hashlib.sha256(os.fsencode(folder)).hexdigest()))
    if recipe.task not in TASKS and recipe.task != "own":
        found.append(_code("task", recipe.task, Path(recipe.task), ""))
    hooks = recipe.hooks.use if recipe.hooks.enabled else []
    for key, places in (("hooks.use", hooks), ("log.to", recipe.log.to)):
        for place in filter(is_place, places):
            where, _, name = place.rpartition(":")
            found.append(_code(key, place, Path(where) if where.endswith(".py") else where, name))
    return found


def _code(key: str, place: str, where: Path | str, name: str) -> Code:
    if isinstance(where, str):
        return _code_of_module(key, place, where, name)
    path = from_here(where).absolute()
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a FIFO would wait for its writer
            raise BadInputError(f"{key}={place}: isn't a regular file, so no code; give another")
        beside = modules_beside(path)
        return Code(key, place, name, hash_of_sources(source_bytes(path), beside), tuple(beside))
    except OSError:  # reported where it is loaded
        return Code(key, place, name, "")


def _code_of_module(key: str, place: str, module: str, name: str) -> Code:
    """Finds a module as an import would, without running it or its packages."""
    parts, paths = module.split("."), [str(from_here(Path()).absolute()), *sys.path]
    top = PathFinder.find_spec(parts[0], paths)
    places = [] if top is None else [top.origin, *(top.submodule_search_locations or [])]
    installed = tuple(
        f"{sysconfig.get_path(one)}{os.sep}" for one in ("stdlib", "platstdlib", "purelib", "platlib")
    )
    file = next((Path(one) for one in places if one is not None and Path(one).is_absolute()), None)
    if file is None or parts[0] in sys.builtin_module_names:
        return Code(key, place, name, _INSTALLED if top or parts[0] in sys.builtin_module_names else "")
    if str(file).startswith(installed):
        return Code(key, place, f"{module}:{name}", _INSTALLED)
    root = file.parent if file.stem != "__init__" and file.is_file() else file.parent.parent
    if file.is_dir():
        root = file.parent
    modules = modules_of(root, module)
    return Code(key, place, name, hash_of_sources(b"", modules), tuple(modules))


# --- check ---


def check_run(
    folder: Path, recipe: Recipe, settings: Sequence[str], trusted: bool | None, new_run: bool = False
) -> None:
    """Checks that the code that a run names may run here.

    Args:
        folder: The run folder.
        recipe: Its configuration, with the settings.
        settings: KEY=VALUE of the command line; code that they name is the user's own.
        trusted: True if --trust was given; None for a command without that flag.
        new_run: True if a new run takes only the recipe, so that the task's file may differ.

    Raises:
        BadInputError: If it may not; the message names the code with its hashes.
    """
    named = _named(settings)
    codes = [one for one in own_code(recipe) if one.key not in named]
    if trusted or not codes:
        return
    if why := _why_not(_recorded(folder), codes):
        listed = ", ".join(map(str, codes))
        code = any(one.key != _PLACE for one in codes)
        what = "Python code that would run here" if code else "a folder that it would write to"
        remedy = f"read it, then {'add --trust' if code else 'add --trust, or --set checkpoint.folder=DIR'}"
        if trusted is None:
            remedy = f"read it, then name it by --set {codes[0].key}=…"
        elif not new_run and _is_another_task(folder, codes):  # then --trust alone doesn't help
            remedy = "bring the file back that it was trained with, or train on by --trust --resume force"
        raise BadInputError(f"{folder}: names {what}: {listed}; {why}: {remedy}")


def _is_another_task(folder: Path, codes: Sequence[Code]) -> bool:
    """True if the task's file isn't the one in the manifest's fingerprint."""
    data = _facts(folder).get("fingerprint")
    known = data.get("task") if isinstance(data, dict) else None
    return any(one.key == "task" and known not in (None, one.hash[:_DIGITS]) for one in codes)


def check_recipe(name: str, recipe: Recipe, settings: Sequence[str], trusted: bool | None = None) -> None:
    """Calls `check_run` for a recipe that lies in a run folder; other recipes are the user's own.

    Raises:
        BadInputError: As `check_run`.
    """
    path = Path(name)
    if path.suffix not in (".yaml", ".yml") or not own_code(recipe):
        return
    for folder in Path(os.path.realpath(path)).parents:
        if _is_run(folder):
            check_run(folder, recipe, settings, trusted, new_run=True)


def _named(settings: Sequence[str]) -> set[str]:
    """Returns the keys for code that the settings give."""
    given = override({}, settings)
    hooks, log, saved = given.get("hooks"), given.get("log"), given.get("checkpoint")
    return {
        *(["task"] if "task" in given else []),
        *(["hooks.use"] if isinstance(hooks, Mapping) and "use" in hooks else []),
        *(["log.to"] if isinstance(log, Mapping) and "to" in log else []),
        *([_PLACE] if isinstance(saved, Mapping) and "folder" in saved else []),
    }


def _is_run(folder: Path) -> bool:
    facts = _facts(folder)
    return "run_id" in facts and "config" in facts


def _facts(folder: Path) -> Mapping[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        if isinstance(facts := read_json(folder / MANIFEST), dict):
            return facts
    return {}


def _recorded(folder: Path) -> Mapping[str, Any]:
    """Returns a manifest's facts on code: {"run_id", "code", "marks"}."""
    facts = _facts(folder)
    trust = facts.get("trust")
    return {"run_id": facts.get("run_id"), **(trust if isinstance(trust, dict) else {})}


def _why_not(recorded: Mapping[str, Any], codes: Sequence[Code]) -> str:
    """Returns the reason why it isn't this user's own code; "" if it is."""
    signs, marks = recorded.get("code"), recorded.get("marks")
    if not isinstance(signs, list) or not isinstance(marks, list) or not signs:
        return "the run has no mark of yours"
    try:
        key = _read_key(key_file())
    except OSError as error:
        return f"whether it is yours is unknown without your key ({_reason(error)})"
    mark = _mark(key, recorded.get("run_id"), signs)
    if mark not in marks:
        return "the run has no mark of yours"
    if odd := [one for one in codes if one.sign not in signs or not one.hash]:
        return f"{plain(odd[0].place, 200)} isn't what the run was trained with"
    return ""


# --- the mark ---


def marked(recipe: Recipe, run_id: str, before: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns the signs of the code that runs now, and this user's mark of them, for the manifest.

    Args:
        before: `trust` of the manifest of earlier attempts; marks of the same code are kept.
    """
    signs = sorted({one.sign for one in own_code(recipe)})
    if not signs:
        return {}
    marks = [one for one in before.get("marks", []) if before.get("code") == signs]
    try:
        mark = _mark(_own_key(), run_id, signs)
    except OSError as error:
        warn(
            f"no key that marks the run as yours can be made ({_reason(error)}): a command that is given its "
            "folder alone will ask for --trust"
        )
        return {"code": signs, "marks": marks}
    return {"code": signs, "marks": marks if mark in marks else [*marks[: _MARKS - 1], mark]}


def _mark(key: bytes, run_id: object, signs: Sequence[object]) -> str:
    said = json.dumps(["trainer run", run_id, list(signs)], default=str).encode(errors="surrogatepass")
    return hmac.new(key, said, hashlib.sha256).hexdigest()


def key_file() -> Path:
    """Returns the path of this user's key.

    Raises:
        OSError: If there is no home.
    """
    configured = os.environ.get("XDG_CONFIG_HOME", "")
    if os.path.isabs(configured):  # noqa: PTH117  (as the standard has it: others don't count)
        return Path(configured) / "trainer" / "key"
    try:
        return Path.home() / ".config" / "trainer" / "key"
    except RuntimeError as error:  # a user who has no entry, and no HOME
        raise OSError(0, "there is no home folder") from error


def _read_key(path: Path) -> bytes:
    """Reads the key; raises OSError if there is none, or others can read or own the file."""
    with os.fdopen(open_regular_file(path), "rb") as file:
        facts = os.fstat(file.fileno())
        if facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
            raise OSError(0, "others can read or own it: chmod 600, or remove it", str(path))
        key = file.read(_KEY_BYTES + 1)
    if len(key) != _KEY_BYTES:
        raise OSError(0, "isn't a key; remove it", str(path))
    return key


def _own_key() -> bytes:
    """Returns this user's key; makes it if there is none."""
    path = key_file()
    with contextlib.suppress(FileNotFoundError):
        return _read_key(path)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = path.with_name(f".key-{secrets.token_hex(8)}")
    file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, secrets.token_bytes(_KEY_BYTES))
        os.fsync(file)
        with contextlib.suppress(FileExistsError):  # another run of this user's was first
            _place(beside, path)
    finally:
        os.close(file)
        beside.unlink(missing_ok=True)
    return _read_key(path)


def _place(beside: Path, path: Path) -> None:
    """Gives the new key its name unless that is taken, so that there is never a second key."""
    try:
        path.hardlink_to(beside)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if not path.exists():
            beside.rename(path)


def _reason(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
