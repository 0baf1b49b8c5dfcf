"""`fit`: training from Python, in this process, as in a notebook."""

import contextlib
import json
import math
import multiprocessing
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.config.recipe import Recipe
from trainer.config.recipe_file import provisional
from trainer.errors import EXIT_DONE, EXIT_REQUEUE, BadInputError, RefusedElsewhereError
from trainer.host.forks import hangs_in_parallel
from trainer.host.here import paths_from_here
from trainer.launch.worker import current
from trainer.models.weights import load_initial
from trainer.observe.rows import FILES, OWN
from trainer.runs.folder import RUNS, read_rows
from trainer.runs.manifest import Manifest, read_stored
from trainer.tasks import Task
from trainer.tasks.custom import CustomTask, object_of, recipe_of
from trainer.train.components.task import limit_data, make_task
from trainer.train.hooks import HookError, find_hooks
from trainer.train.options import Mode, parse_source
from trainer.train.request import Request
from trainer.train.start.micro_batch import stored_size, usual_size
from trainer.train.start.rank import not_left_by, train_rank
from trainer.train.start.undo import undone


@dataclass(frozen=True)
class Fitted:
    """Finished run.

    Attributes:
        folder: The run folder, an absolute path.
        task: The task.
        metrics: Metrics of the last evaluation, by name.
    """

    folder: Path
    task: Task
    metrics: dict[str, float]

    def rows(self, kind: str = "train") -> list[dict[str, Any]]:
        """Reads metrics records of a kind.

        Args:
            kind: "train" (each log.every steps, and before evaluations), "eval", "hook" and others.

        Raises:
            BadInputError: If there is no such kind.
        """
        if kind not in FILES:
            raise BadInputError(f"rows({kind!r}): the kinds are {', '.join(FILES)}")
        return list(read_rows(self.folder, kind))

    def model(self) -> nn.Module:
        """Makes a model in evaluation mode with the final weights, or their average if the run kept one."""
        model = self.task.model()
        files = [self.folder / name for name in ("ema.safetensors", "model.safetensors")]
        load_initial(model, next(filter(Path.exists, files), files[-1]), ())
        return model.eval()


def fit(
    task: str | Path | object,
    settings: Mapping[str, Any] | None = None,
    *,
    out: str | Path | None = None,
    resume: Mode = "auto",
    from_run: str | Path | None = None,
    hooks: Sequence[Any] = (),
) -> Fitted:
    """Trains in this process, on one GPU or on the CPU, as `trainer train` does without its launcher.

    After an interruption, a call with the same `out` resumes from the newest checkpoint. A process does one
    fit at a time. What fit sets (torch's random state and switches, `sys.path`) is undone at its end.

    Args:
        task: A recipe's name, a YAML or Python file, or an object (or class) with the methods of a task
            (`trainer new`); RECIPE, in its class or beside it, is the configuration.
        settings: Configuration keys, `{"epochs": 3, "optim.lr": 0.1}`.
        out: Run folder: a new or empty one, or that of a run to resume; default: a new one in runs.
        resume: As `trainer train --resume`.
        from_run: As `trainer train --init-from`: a run folder, with @STEP or @best after it.
        hooks: Objects or classes with `after_step`, `after_evaluation` or `after_checkpoint`; their
            exceptions come through, unless hooks.on_error is "warn".

    Returns:
        The finished run.

    Raises:
        BadInputError: If anything given is wrong, naming the remedy.
        KeyboardInterrupt: After Ctrl-C in the main thread: the first one saves a checkpoint before, a second
            one doesn't wait.
    """
    with _one_at_a_time(), undone(), paths_from_here():
        try:
            with contextlib.ExitStack() as stack:
                return _fit(stack, task, settings or {}, out, resume, from_run, hooks)
        except HookError as error:
            if not isinstance(error.__cause__, Exception):  # sys.exit() would look like a finished run
                raise
            raise error.__cause__ from error.__cause__.__cause__


def _fit(
    stack: contextlib.ExitStack,
    task: str | Path | object,
    settings: Mapping[str, Any],
    out: str | Path | None,
    resume: Mode,
    from_run: str | Path | None,
    hooks: Sequence[Any],
) -> Fitted:
    # JSON is YAML, so these are arguments of --set.
    words = [f"{key}={json.dumps(value, default=_plain)}" for key, value in settings.items()]
    wanted, runs = None if out is None else _absolute(out), RUNS if out is not None else _absolute(RUNS)
    source = None if from_run is None else parse_source(str(from_run))
    stored = None if wanted is None else read_stored(wanted)
    if hangs_in_parallel():
        torch.set_num_threads(1)  # from here on: more would wait for ever, also in a user's method
    with not_left_by(str(getattr(task, "__name__", task))):
        name, recipe, opened = _open(task, words, stored)
    if hangs_in_parallel() and recipe.parallel.threads != 1:
        raise BadInputError(
            "fit was called in a fork of a process in which torch had computed with several threads, as in "
            "an earlier fit: they don't come through a fork, and this one would wait for ever; start "
            'it by multiprocessing.get_context("spawn") (ProcessPoolExecutor(mp_context=…)), or set '
            "parallel.threads=1"
        )
    if not isinstance(task, str | Path):
        assert isinstance(opened, CustomTask)
        stack.callback(opened.remember_changes)
    find_hooks(recipe.hooks, hooks)
    try:
        request = Request(recipe, name, wanted, resume, source=source, settings=words, runs=runs)
        code, folder = train_rank(request, opened, hooks)
    except RefusedElsewhereError as error:
        raise BadInputError(str(error)) from error
    if code == EXIT_REQUEUE:
        raise KeyboardInterrupt  # the run is saved; a notebook's cell ends as the user asked
    if code != EXIT_DONE:
        raise BadInputError(
            f'{folder}: stopped before its end (code {code}); go on by fit(…, out="{folder}")'
        )
    run = Fitted(folder, opened, {})
    evaluations = run.rows("eval")
    last = evaluations[-1] if evaluations else {}
    run.metrics.update({n: math.nan if v is None else v for n, v in last.items() if n not in OWN})
    return run


def _absolute(out: str | Path) -> Path:
    if not isinstance(out, str | os.PathLike) or "\0" in str(out):
        raise BadInputError(f"out={out!r}: give the path of a folder")
    try:
        return Path(out).absolute()
    except FileNotFoundError as error:
        raise BadInputError(
            f"out={str(out)!r}: the current folder was deleted; give an absolute path, or go to another"
        ) from error


def _open(
    task: str | Path | object, words: Sequence[str], stored: Manifest | None
) -> tuple[str, Recipe, Task]:
    """Returns name, configuration and task of the argument `task` of `fit`."""
    if isinstance(task, str | Path):
        recipe = _sized(stored, *provisional(str(task), words))
        return Path(task).stem, recipe, make_task(recipe)
    own = object_of(task, "fit")
    name = type(own).__name__
    recipe = _sized(stored, *provisional(name, words, recipe_of(own)))
    opened = CustomTask(own, name)
    return name, recipe, limit_data(opened, recipe.data.limit)


def _sized(stored: Manifest | None, recipe: Recipe, auto: bool) -> Recipe:
    """Returns a recipe with a number in place of data.micro_batch_size=auto."""
    if not auto:
        return recipe
    number = stored_size(stored) or usual_size(recipe, 1, "fit tries no others")
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"micro_batch_size": number})})


_under_way = threading.Lock()


def _in_a_fork() -> None:
    global _under_way  # noqa: PLW0603
    _under_way = threading.Lock()


os.register_at_fork(after_in_child=_in_a_fork)


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Refuses a second fit in this process, as both would draw from torch's default generator."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # multiprocessing's own test
        raise BadInputError(
            "fit was called by a process that a fit has started, and that only imports the script: put the "
            'call under if __name__ == "__main__":'
        )
    if current() is not None or not (lock := _under_way).acquire(blocking=False):
        raise BadInputError(
            "a fit is under way in this process, and would share torch's random state with a second one: "
            "wait for its end, or start a process for each"
        )
    try:
        yield
    finally:
        lock.release()


def _plain(value: Any) -> Any:
    """Converts numbers, arrays and tensors to Python's, and paths to text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
