"""Checks before a run starts: one table, each check once for a job (by rank 0) or once on each host.

They run after `decide` has found out whether a run begins or resumes. Before that `prepare` runs
`threads_line` and `check_request`, which finds what would fail on every rank.
"""

from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from trainer.config.idle import idle_keys, idle_length, own_defaults, typed_keys
from trainer.config.recipe import WHY_NO_MPS, Recipe
from trainer.data.sampling.plan import MOST_STEPS
from trainer.host.limits import read_limits
from trainer.observe.console import say, warn
from trainer.observe.progress import check_metrics_port
from trainer.runs.folder import warn_of_loss
from trainer.runs.manifest import Manifest
from trainer.runs.tracking.tracker import check_reachable
from trainer.tasks import Task
from trainer.train.components.task import check_files, make_plan
from trainer.train.components.updates import brings_optimizer, check_end
from trainer.train.options import Mode
from trainer.train.start.local_ranks import check_threads

CheckPlace = Literal["job", "host"]  # a check runs in one process of the job, or in one on each host


class Start(NamedTuple):
    """Run to be checked.

    Attributes:
        recipe: The configuration.
        task: The recipe's task.
        folder: The run folder; while it isn't made yet, the folder of all runs.
        stored: The manifest of the run that is resumed; None for a new one.
        settings: Settings KEY=VALUE as they were typed.
    """

    recipe: Recipe
    task: Task
    folder: Path
    stored: Manifest | None = None
    settings: Sequence[str] = ()


def threads_line(recipe: Recipe, stored: Manifest | None, mode: Mode) -> str:
    """Returns a warning if a rank has more threads than CPUs; "" if not.

    Args:
        recipe: The configuration.
        stored: The manifest of earlier attempts, or None.
        mode: The flag --resume; with "force", which `trainer verify` uses, any number is accepted.

    Raises:
        BadInputError: If there are more than 64 threads, more than CPUs, and the run wasn't begun with them.
    """
    threads = recipe.parallel.threads
    begun_with = stored.threads if stored is not None and mode != "force" else None
    count = begun_with if threads == "auto" else threads
    if count is None:  # chosen by the CPUs
        return ""
    return check_threads(count, read_limits(), known=mode == "force" or count == begun_with)


def _schedule(start: Start) -> None:
    """Checks that a task's own scheduler doesn't end before the last step of a run that is resumed."""
    if start.stored is not None:
        steps = make_plan(start.recipe, start.task).steps
        check_end(start.folder, start.stored, start.task, steps)


def _files(start: Start) -> None:
    """Checks the files of the data."""
    check_files(start.recipe, start.task)


def _services(start: Start) -> None:
    """Checks for a new run that its trackers are reachable and the metrics port is free."""
    if start.stored is None:
        check_reachable(start.recipe.log.to)
        check_metrics_port(start.recipe.log)


def _container_layer(start: Start) -> None:
    """Warns if the folder is removed with the container."""
    warn_of_loss(start.folder)


def _no_mps(start: Start) -> None:
    """Reports on a Mac that its GPU isn't used."""
    if start.recipe.device == "auto" and torch.backends.mps.is_available():
        say(f"  {WHY_NO_MPS}: this trains on the CPU")


def _settings(start: Start) -> None:
    """Warns of settings without effect, and reports the defaults that a custom task is trained with."""
    recipe, typed = start.recipe, typed_keys(start.settings)
    steps = make_plan(recipe.model_copy(update={"max_steps": MOST_STEPS}), start.task).steps
    for line in (*idle_keys(recipe, typed), *idle_length(recipe, typed, steps)):
        warn(line)
    line = own_defaults(recipe, typed, brings_optimizer(start.task))
    if line and start.stored is None:
        say(line)


START_CHECKS: tuple[tuple[CheckPlace, Callable[[Start], None]], ...] = (
    ("job", _schedule),
    ("host", _files),
    ("job", _services),
    ("job", _container_layer),
    ("job", _settings),
    ("job", _no_mps),
)


def check_start(start: Start, here: Set[CheckPlace]) -> None:
    """Runs the checks of the kinds `here`, in the order of `START_CHECKS`.

    Raises:
        BadInputError: If a check fails; its message names the remedy.
    """
    for place, check in START_CHECKS:
        if place in here:
            check(start)
