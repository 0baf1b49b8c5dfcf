"""`trainer predict RUN FILES…`: shows predictions; the task decides what kind of files it reads."""

import argparse
from collections.abc import Callable

from trainer.config.registry import named
from trainer.config.tasks import TASKS
from trainer.errors import BadInputError
from trainer.tasks.coco_results import check_results
from trainer.train.model_of_run import OpenedRun, open_run


def predict(options: argparse.Namespace) -> int:
    """Runs `trainer predict`.

    A custom task may have a method `predict(model, options)`, which gets the model in evaluation mode and the
    options of the command line, prints, and returns the exit code.

    Returns:
        0, 1 if some of the files couldn't be read, 2 if none could.

    Raises:
        BadInputError: If the run can't be opened, an option is wrong, or its task has nothing to show.
    """
    if options.samples < 1 or options.top < 1 or not 0 <= options.score <= 1:
        raise BadInputError("--samples and --top: give a number from 1 on; --score: from 0 to 1")
    run = open_run(options.folder, options.set)
    for flag in ("prompt", "prompts", "system"):
        if getattr(options, flag) is not None and run.recipe.task != "language":
            raise BadInputError(f"--{flag}: {run.folder} is of task={run.recipe.task}, which takes no text")
    if options.out is not None and run.recipe.task in TASKS and run.recipe.task != "detection":
        raise BadInputError(f"--out: boxes are drawn, and task={run.recipe.task} has none; leave it out")
    if run.recipe.task in TASKS:
        check_results(options.coco, run.task)
    return _show(run)(run, options)


def _show(run: OpenedRun) -> Callable[[OpenedRun, argparse.Namespace], int]:
    task = run.recipe.task
    if task in TASKS:
        show: Callable[[OpenedRun, argparse.Namespace], int] = named(TASKS[task].shows)
        return show
    own = getattr(run.task, "predict", None)
    if own is None:
        raise BadInputError(
            f"{run.folder}: the class in {task} has no method predict(model, options), which prints what the "
            "model says; add it and train again (a run's file stays as it was trained with)"
        )
    return lambda run, options: int(own(run.model, options) or 0)
