"""A custom task: a class with a few methods, in a file or in a notebook (see `trainer new`)."""

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from trainer.config.task_file import (
    custom_task_recipe,
    hash_of_sources,
    modules_beside,
    read_source,
    split_task,
)
from trainer.config.user_file import run_again, run_file
from trainer.data.items import state_kept
from trainer.errors import BadInputError
from trainer.host.here import from_here
from trainer.optim.own import HostSchedule
from trainer.tasks.custom_trial import initial_weights, try_task, try_updates
from trainer.tasks.identity import Identity, identity_of
from trainer.tasks.own_methods import WANTED, OwnMethods, line_of

DRAWS = "draws"  # in `tried`, of a task whose `loss` draws from numpy's or Python's generators


class CustomTask(OwnMethods):
    """A task from the user's class, with a trial of its methods before training.

    Args:
        own: See `OwnMethods`.
        source: See `OwnMethods`.
        identity: Identity of the first object of its class; None: this is the first.

    Attributes:
        identity: Identity of the object as it was given, see `trainer.tasks.identity`.
        remake: Makes a new object of the class; None: the class itself.
    """

    remake: Callable[[], object] | None = None

    def __init__(self, own: Any, source: str, identity: Identity | None = None) -> None:
        """Opens the data."""
        # Before a method changes anything.
        self.identity = identity or _as_begun(own, identity_of(own))
        super().__init__(own, source)

    def check(self) -> None:
        """Tries every method on a few samples, on the CPU.

        Raises:
            BadInputError: Naming the method that is wrong, and the result that it should give.
        """
        with state_kept():
            tried = try_task(self)
        self.tried = {**tried, DRAWS: "numpy or random"} if self.draws_on_host else tried

    def check_updates(self, make: Callable[[nn.Module], HostSchedule]) -> None:
        """Tries the optimizer and scheduler that `make` creates for a model; raises as `check` does."""
        try_updates(self, make)

    def anew(self) -> "CustomTask":
        """Returns the task of a new object of the same class: what a trial left in the old one is gone."""
        task = _made(type(self._own), self._source, self.source_hash, self.hooks, self.identity)
        task.tried, task.remake = self.tried, self.remake
        return task

    def remember_changes(self) -> None:
        """Remembers what a run changed in this process: what it finds there again is as it was before.

        Examples are an attribute that counts calls, and a list of a notebook that `loss` appends to.
        """
        with suppress(Exception):
            left = identity_of(self._own)
            pairs = ((self.identity.code, left.code), (self.identity.values, left.values))
            for before, after in pairs:
                for name in before.keys() | after.keys():
                    if before.get(name) != after.get(name):
                        _left_by_runs(self._own, name)[name, after.get(name)] = before.get(name)

    @cached_property
    def varying(self) -> frozenset[str]:
        """Names of values and results that are new each time, such as a time of day: nothing to compare.

        Two further objects are made for it, of a file that is run again.
        """
        make, names = self.remake or type(self._own), set[str]()
        with suppress(Exception):  # a class that wants arguments
            one, other = (identity_of(make()).values for _ in range(2))
            names = {name for name in one | other if one.get(name) != other.get(name)}
        with suppress(Exception):
            if len({initial_weights(self) for _ in range(2)}) > 1 or names:
                names |= {*self.tried}
        return frozenset(names)


_left_of_classes: "WeakKeyDictionary[type, dict[tuple[str, str | None], str | None]]" = WeakKeyDictionary()
_left_in_globals: dict[tuple[str, str | None], str | None] = {}


def _left_by_runs(own: object, name: str) -> dict[tuple[str, str | None], str | None]:
    """Returns the values that runs began with, by the name and the value that they left."""
    if name.startswith("global "):  # the class may be another by now: a cell that was run again
        return _left_in_globals
    return _left_of_classes.setdefault(type(own), {})


def _as_begun(own: object, identity: Identity) -> Identity:
    """Returns an identity without what earlier runs of this process have changed."""

    def begun(entries: Mapping[str, str]) -> dict[str, str]:
        found = {name: _left_by_runs(own, name).get((name, one), one) for name, one in entries.items()}
        return {name: one for name, one in found.items() if one is not None}

    return identity._replace(code=begun(identity.code), values=begun(identity.values))


def custom_task(task: str) -> CustomTask:
    """Runs the user's file and returns its task: the class that FILE.py:CLASS names, or the only one.

    Raises:
        BadInputError: If the file can't be run, holds no such class, or the class lacks a method; or if the
            file, or a module beside it, changed meanwhile: its hash is to be of what was run.
    """
    path, name = split_task(task)
    path = from_here(path)
    text, beside = read_source(path).encode(), modules_beside(path)
    module = _run(path)
    kind, hooks = _class_in(module, path, name)
    _check_recipe(path, name, getattr(kind, "RECIPE", getattr(module, "RECIPE", {})))
    before, after = (
        {path.name: text, **beside},
        {path.name: read_source(path).encode(), **modules_beside(path)},
    )
    if changed := [one for one in before | after if before.get(one) != after.get(one)]:
        raise BadInputError(f"{path}: {', '.join(changed)} changed while it was imported; start again")
    made = _made(kind, str(path), hash_of_sources(text, beside)[:16], hooks)

    def again() -> object:
        with run_again(path) as module:
            return _class_in(module, path, name)[0]()

    made.remake = again
    return made


def recipe_of(own: object) -> dict[str, Any]:
    """Returns the configuration of an object that `fit` was given: RECIPE, in its class or beside it.

    Raises:
        BadInputError: If it isn't a dict.
    """
    beside = getattr(sys.modules.get(type(own).__module__), "RECIPE", {})
    if not isinstance(found := getattr(own, "RECIPE", beside), Mapping):
        what = f'RECIPE is a dict such as {{"epochs": 5}}, not {type(found).__name__}'
        raise BadInputError(f"{type(own).__name__}: {what}")
    return {**found, "task": "own"}


def _run(path: Path) -> ModuleType:
    try:
        return run_file(path, alone=True)
    except BadInputError:
        raise
    except Exception as error:
        raise BadInputError(
            f"{path}{line_of(error, path)}: {type(error).__name__}: {error}; mend the file"
        ) from error


def _check_recipe(path: Path, name: str, found: object) -> None:
    """Refuses a RECIPE that a file changed, imported or inherited: it was read before the file was run."""
    read = custom_task_recipe(f"{path}:{name}" if name else str(path))
    del read["task"]
    if found != read:
        was = found if isinstance(found, dict) else {}
        odd = [str(key) for key in {**was, **read} if was.get(key) != read.get(key)]
        raise BadInputError(
            f"{path}: RECIPE is another one once the file was run ({', '.join(odd)}), and it is read before; "
            "write all of it in one dict, in the class or beside it"
        )


def _class_in(module: ModuleType, path: Path, name: str) -> tuple[type, Any]:
    """Returns the class and the hooks of a file that was run."""
    there = [one for one in vars(module).values() if isinstance(one, type) and hasattr(one, "loss")]
    classes = [one for one in there if one.__module__ == module.__name__]
    if name:
        classes = [one for one in there if one.__name__ == name]
    if len(classes) != 1:
        names = ", ".join(one.__name__ for one in classes or there) or "none"
        hint = ", which it imports: define a class of its own" if there and not name else ""
        hint = f"; name one, as {path.name}:{classes[0].__name__}" if classes else hint
        wanted = f"the class {name}" if name else "one class"
        raise BadInputError(
            f"{path}: {wanted} with the methods {', '.join(WANTED)} is wanted; found {names}{hint}"
        )
    beside = getattr(module, "hooks", ())
    hooks = getattr(classes[0], "hooks", beside)
    if isinstance(beside, list) and hooks is not beside:
        kind = classes[0].__name__
        raise BadInputError(f"{path}: hooks are in the class {kind} and beside it; keep one list")
    return classes[0], hooks


def object_of(task: Any, source: str) -> Any:
    """Returns a new object of a class; what is no class as it is.

    Raises:
        BadInputError: If the class can't be called.
    """
    try:
        return task() if isinstance(task, type) else task
    except Exception as error:
        raise BadInputError(f"{source}: {task.__name__}() raised {type(error).__name__}: {error}") from error


def _made(
    kind: type, source: str, source_hash: str, hooks: Any, identity: Identity | None = None
) -> CustomTask:
    task = CustomTask(object_of(kind, source), source, identity)
    task.source_hash, task.hooks = source_hash, hooks
    return task
