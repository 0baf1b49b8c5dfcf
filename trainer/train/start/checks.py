"""Checks before a run starts, and where each runs: one list for the launcher, ranks without one, and `fit`.

`START_CHECKS` run once it is decided how a run starts (`decision`). Where a rank runs them,
`places` says; a launcher is one on each host, and on node 0 the one of the job, too; `fit` is both. Ranks
without a launcher look at their first start: a restart by torchrun goes on with what was found good.
Besides them:

| check | where |
|---|---|
| flags, `--tuned`, `threads_line` | before the data is opened: launcher, first process of a job, `fit` |
| `check_request`: what would fail on every rank | launcher, `fit`; each rank with the number of all ranks |
| `decide`: another run, `--from`, finished | launcher, `fit`; each rank, under the lock of rank 0 |
| `claim_folder`, of a run that begins | node 0's launcher, rank 0, `fit` |
| `check_inside`, `lock` | rank 0 |
"""

from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from trainer.config.idle import idle_keys, idle_length, own_defaults, typed_keys
from trainer.config.recipe import WHY_NO_MPS, Recipe
from trainer.data.sampling.plan import MOST_STEPS
from trainer.host.limits import read_limits
from trainer.launch.worker import current
from trainer.observe.console import say, warn
from trainer.observe.progress import check_metrics_port
from trainer.runs.folder import warn_of_loss
from trainer.runs.manifest import Manifest
from trainer.runs.tracking.tracker import check_reachable
from trainer.tasks import Checked, Task
from trainer.train.components.task import check_files, make_plan
from trainer.train.components.updates import brings_optimizer, check_end
from trainer.train.options import Mode
from trainer.train.start.decision import Decision, Resume
from trainer.train.start.local_ranks import check_threads

CheckPlace = Literal["job", "host"]  # one process of all; one on each host


class Start(NamedTuple):
    """Subject of the checks; the folder is that of all runs, if the run's own isn't made yet."""

    recipe: Recipe
    task: Task
    folder: Path
    decision: Decision
    settings: Sequence[str] = ()  # as they were typed


def threads_line(recipe: Recipe, stored: Manifest | None, mode: Mode) -> str:
    """A line about more threads than CPUs, or nothing; --resume force, as of `trainer verify`, takes any.

    Raises:
        BadInputError: If there are far too many.
    """
    threads = recipe.parallel.threads
    begun_with = stored.threads if stored is not None and mode != "force" else None
    count = begun_with if threads == "auto" else threads
    if count is None:  # chosen by the CPUs
        return ""
    return check_threads(count, read_limits(), known=mode == "force" or count == begun_with)


def _own_check(start: Start) -> None:
    if current() is not None and isinstance(start.task, Checked):  # else `check_request` does it
        start.task.check()


def _schedule(start: Start) -> None:
    """A schedule of the task's own doesn't end before a run that goes on."""
    if isinstance(start.decision, Resume):
        steps = make_plan(start.recipe, start.task).steps
        check_end(start.folder, start.decision.stored, start.task, steps)


def _files(start: Start) -> None:
    check_files(start.recipe, start.task)


def _outside(start: Start) -> None:
    """Trackers answer, and the port of metrics is free, for a run that begins."""
    if not isinstance(start.decision, Resume):
        check_reachable(start.recipe.log.to)
        check_metrics_port(start.recipe.log)


def _loss(start: Start) -> None:
    warn_of_loss(start.folder)


def _mac(start: Start) -> None:
    if start.recipe.device == "auto" and torch.backends.mps.is_available():
        say(f"  {WHY_NO_MPS}: this trains on the CPU")


def _settings(start: Start) -> None:
    """Notes settings without effect, and defaults that a task of the user's own is trained with."""
    recipe, typed = start.recipe, typed_keys(start.settings)
    steps = make_plan(recipe.model_copy(update={"max_steps": MOST_STEPS}), start.task).steps
    for line in (*idle_keys(recipe, typed), *idle_length(recipe, typed, steps)):
        warn(line)
    line = own_defaults(recipe, typed, brings_optimizer(start.task))
    if line and not isinstance(start.decision, Resume):
        say(line)


START_CHECKS: tuple[tuple[CheckPlace, Callable[[Start], None]], ...] = (
    ("job", _own_check),
    ("job", _schedule),
    ("host", _files),
    ("job", _outside),
    ("job", _loss),
    ("job", _settings),
    ("job", _mac),
)


def places(variables: Mapping[str, str]) -> set[CheckPlace]:
    """Returns the places at which a rank runs the checks."""
    found: dict[CheckPlace, str] = {"job": "RANK", "host": "LOCAL_RANK"}
    return {place for place, name in found.items() if variables.get(name, "0") == "0"}


def check_start(start: Start, here: Set[CheckPlace]) -> None:
    """Looks at what is to be looked at here.

    Raises:
        BadInputError: What is wrong, and the remedy.
    """
    for place, check in START_CHECKS:
        if place in here:
            check(start)
