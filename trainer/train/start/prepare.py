"""Preparation of a run: weights, task, decision, checks and run folder, in one order for every way in.

The launcher prepares for its ranks, a rank without a launcher and `fit` for themselves.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from trainer.config.recipe import Recipe
from trainer.host.here import from_here
from trainer.observe.console import warn
from trainer.observe.profile import ProfileKind
from trainer.runs.folder import RUNS, check_inside, claim_folder, new_folder
from trainer.runs.manifest import read_stored
from trainer.tasks import Task
from trainer.train.components.task import check_request, make_task
from trainer.train.options import Mode, StartingPoint
from trainer.train.request import Request
from trainer.train.start.checks import CheckPlace, Start, check_start, threads_line
from trainer.train.start.decision import Decision, Finished, From, Resume, decide
from trainer.train.starting_weights import keep_beginning, resolve_pretrained


@dataclass(frozen=True)
class Asked:
    """What a start asks for.

    Attributes:
        recipe: The configuration.
        name: Name of the recipe.
        ranks: Number of ranks of the job.
        here: Checks that this process runs.
        first: True in the one process of the job that makes the run folder.
        again: True where ranks are restarted, so that the run folder is made already.
        folder: The run folder; None for a new one below `runs`.
        runs: The folder of all runs.
        resume: The flag --resume.
        source: The checkpoint of another run to begin from, or None.
        settings: Settings KEY=VALUE as they were typed.
        stop_after: The step after which to stop, or None.
        profile: Kind of profile of some steps, or None.
    """

    recipe: Recipe
    name: str
    ranks: int
    here: Set[CheckPlace]
    first: bool
    again: bool = False
    folder: Path | None = None
    runs: Path = RUNS
    resume: Mode = "auto"
    source: StartingPoint | None = None
    settings: Sequence[str] = ()
    stop_after: int | None = None
    profile: ProfileKind | None = None


@dataclass(frozen=True)
class PreparedRun:
    """A run that may be trained.

    Attributes:
        request: What its ranks are asked for.
        task: The task.
        decision: How it starts.
        made: True if the run folder was made here.
    """

    request: Request
    task: Task
    decision: Decision
    made: bool


def prepare(asked: Asked, task: Task | None = None) -> PreparedRun:
    """Prepares a run. Bad input leaves no folder.

    Args:
        asked: What the start asks for.
        task: The task, where it is made already.

    Raises:
        BadInputError: If a check fails.
    """
    folder = asked.folder
    stored = None if folder is None else read_stored(folder)
    if "job" in asked.here and (line := threads_line(asked.recipe, stored, asked.resume)):
        warn(line)
    recipe, pretrained, fresh = resolve_pretrained(
        asked.recipe, stored, folder, asked.resume, asked.source
    )  # one process of a host fetches the weights, the others wait for it
    task = task or make_task(recipe)
    check_request(recipe, task, asked.ranks, fresh)
    # Code of the task may have left the folder of the start.
    folder = folder and from_here(folder)
    source = asked.source and asked.source._replace(run=from_here(asked.source.run))
    decision = decide(recipe, folder, task, pretrained=pretrained, resume=asked.resume, source=source)
    made, runs = False, from_here(asked.runs)
    if not isinstance(decision, Finished):
        check_start(Start(recipe, task, folder or runs, decision, asked.settings), asked.here)
        folder, made = _folder(asked, recipe, folder, runs, isinstance(decision, Resume))
    begun_from = decision.checkpoint if isinstance(decision, From) else None
    if begun_from is not None and asked.first:
        keep_beginning(folder or runs, begun_from)
    request = Request(
        recipe,
        asked.name,
        (folder or runs).absolute(),  # the same after each restart
        asked.resume,
        asked.stop_after,
        asked.profile,
        begun_from=begun_from,
        pretrained=pretrained,
        tried=dict(getattr(task, "tried", {})),
    )
    return PreparedRun(request, task, decision, made)


def _folder(
    asked: Asked, recipe: Recipe, wanted: Path | None, runs: Path, resumes: bool
) -> tuple[Path, bool]:
    """Returns the run folder, and True if it was made here; only one process of the job makes it."""
    if not asked.first:
        return wanted or runs, False
    if wanted is None:
        folder, made = new_folder(runs, asked.name, recipe), True
    else:
        folder, made = wanted, not (resumes or asked.again) and claim_folder(wanted)
    check_inside(folder)
    return folder, made
