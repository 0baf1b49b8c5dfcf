"""Loader workers and prefetch of a rank, as configured or by rule (`trainer.data.workers`)."""

import multiprocessing
from typing import NamedTuple

from trainer.config.data import LoaderConfig
from trainer.config.recipe import Recipe
from trainer.data.loader import is_resident
from trainer.data.workers import (
    EVALUATION_WORKERS,
    Loading,
    Sizes,
    by_rule,
    bytes_needed,
    estimate,
    sizes_of,
    start_method,
    unimportable,
    workers_of,
)
from trainer.errors import BadInputError
from trainer.host.limits import Limits
from trainer.tasks import Task
from trainer.train.components.task import more_sets


class Choice(NamedTuple):
    """Choice of loader workers and prefetch for a rank.

    Attributes:
        setting: Loader workers and prefetch; with `auto` the evaluation takes at most two loader workers.
        bytes: Memory that the loader needs; 0 without loader workers.
        line: The choice as a line for the user, or "".
    """

    setting: Loading
    bytes: int = 0
    line: str = ""


def choose_loading(recipe: Recipe, task: Task, limits: Limits, ranks: int) -> Choice:
    """Chooses numbers in place of `auto`.

    Args:
        recipe: The configuration.
        task: Has the data.
        limits: CPUs and memory of this container.
        ranks: Number of ranks in this container.

    Raises:
        BadInputError: If loader workers are asked for in a daemonic process, which can't start any.
    """
    config = recipe.data
    if not _loads(config, task):
        return Choice(Loading(0, 1))
    if multiprocessing.current_process().daemon:  # Python lets it start no processes
        if config.workers == "auto":
            return Choice(Loading(0, 1))
        raise BadInputError(
            f"data.workers={config.workers}: this process is daemonic, as those of a multiprocessing.Pool, "
            "and may start no others: set data.workers=0, or take concurrent.futures.ProcessPoolExecutor"
        )
    method, sets = start_method(config.start_method), (task.train_data, task.evaluation_data)
    if config.workers == "auto" and (name := next(filter(None, (unimportable(s, method) for s in sets)), "")):
        line = f"loader: no workers, as none could import {name}; from a module of yours they can"
        return Choice(Loading(0, 1), line=line)
    size = _sizes(recipe, task)
    setting = by_rule(config.workers, config.prefetch, size, limits, ranks)
    source = "by rule" if "auto" in (config.workers, config.prefetch) else "as configured"
    line = f"loader: {estimate(setting, size, limits, ranks)} ({source})"
    return Choice(setting, bytes_needed(setting, size), line)


def for_more_sets(config: LoaderConfig) -> LoaderConfig:
    """Returns the configuration of a further evaluation set's loader: at most two loader workers."""
    if config.workers == "auto":
        return config
    return config.model_copy(update={"workers": min(config.workers, EVALUATION_WORKERS)})


def _loads(config: LoaderConfig, task: Task) -> bool:
    """True if loader workers could load the data: it isn't in memory, nor read by the rank itself."""
    return not is_resident(config, task.train_data) and workers_of(config, task.train_data, 1) > 0


def _sizes(recipe: Recipe, task: Task) -> Sizes:
    sets = (task.evaluation_data, *more_sets(task).values())
    measured = min(recipe.data.eval_batch_size, max(map(len, sets)))
    # A rank has no threads yet when it starts its loader workers.
    data = recipe.data
    found = sizes_of(task.train_data, data.micro_batch_size, measured, data.start_method, len(sets))
    return found._replace(workers=data.workers)
