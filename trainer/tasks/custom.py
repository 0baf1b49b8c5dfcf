"""A custom task: a class with a few methods, in a file or in a notebook (see `trainer new`)."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from trainer.config.beside import run_file
from trainer.config.task_file import read_source, source_hash
from trainer.errors import BadInputError
from trainer.host.here import from_here
from trainer.optim.own import HostSchedule
from trainer.tasks.custom_trial import try_task, try_updates
from trainer.tasks.own_methods import WANTED, OwnMethods, line_of


class CustomTask(OwnMethods):
    """A task from the user's class, with a trial of its methods before training."""

    def check(self) -> None:
        """Tries every method on a few samples, on the CPU.

        Raises:
            BadInputError: Naming the method that is wrong, and the result that it should give.
        """
        try_task(self)

    def check_updates(self, make: Callable[[nn.Module], HostSchedule]) -> None:
        """Tries the optimizer and scheduler that `make` creates for a model; raises as `check` does."""
        try_updates(self, make)

    def anew(self) -> "CustomTask":
        """Returns the task of a new object of the same class: what a trial left in the old one is gone."""
        return _made(type(self._own), self._source, self.source_hash, self.hooks)


def custom_task(path: Path) -> CustomTask:
    """Runs the user's file and returns its task: the only class in it with a method `loss`.

    Raises:
        BadInputError: If the file can't be run, holds no such class, or the class lacks a method.
    """
    path = from_here(path)
    read_source(path)
    try:
        _, module = run_file(path, "task")
    except Exception as error:
        # A relative import that fails names the package that the folder is here.
        said = re.sub(rf"{re.escape(run_file.__module__)}\.\w+\.", "", str(error))
        raise BadInputError(
            f"{path}{line_of(error, path)}: {type(error).__name__}: {said}; mend the file"
        ) from error
    there = [one for one in vars(module).values() if isinstance(one, type) and hasattr(one, "loss")]
    classes = [one for one in there if one.__module__ == module.__name__]
    if len(classes) != 1:
        names = ", ".join(one.__name__ for one in classes or there) or "none"
        imported = ", which it imports: define a class of its own" if there and not classes else ""
        raise BadInputError(
            f"{path}: one class with the methods {', '.join(WANTED)} is wanted; found {names}{imported}"
        )
    return _made(classes[0], str(path), source_hash(path), getattr(module, "hooks", ()))


def _made(kind: type, source: str, source_hash: str, hooks: Any) -> CustomTask:
    try:
        own = kind()
    except Exception as error:
        raise BadInputError(f"{source}: {kind.__name__}() raised {type(error).__name__}: {error}") from error
    task = CustomTask(own, source)
    task.source_hash, task.hooks = source_hash, hooks
    return task
