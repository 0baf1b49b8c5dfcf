"""What a start of a run looks at, once, by the launcher, by ranks that have none, or by `fit`.

| check | launcher | ranks without one | `fit` |
|---|---|---|---|
| `threads_line` | yes | rank 0 | yes |
| `CustomTask.check` | in `check_request` | rank 0 | in `check_request` |
| `begun`: what `--from` names | yes | each rank | yes |
| `check_stored`: may it go on, is it over, is its schedule | yes | rank 0 | yes |
| `check_files`: is the data there | each node | first rank of each node | yes |
| `check_outside`, of a run that begins | node 0 | rank 0 | yes |
| `claim_folder`, the same | node 0 | rank 0 | yes |
| `warn_of_loss`: does the folder outlive the container | yes | rank 0 | yes |

Ranks without a launcher look at their first start: a restart by torchrun goes on with what was found good.
What each rank checks for itself is in `trainer.train.trainer`.
"""

from pathlib import Path

from trainer.config.recipe import Recipe
from trainer.host.here import shown
from trainer.host.limits import read_limits
from trainer.observe.progress import check_metrics_port
from trainer.tasks import Task
from trainer.train.begin import find_beginning
from trainer.train.local_ranks import check_threads
from trainer.train.manifest import BegunFrom, Manifest, Pretrained
from trainer.train.resume import Mode, StartingPoint, check_beginning, check_resumable, ended
from trainer.train.run import data_of, device_kind, make_plan
from trainer.train.tracking.tracker import check_reachable
from trainer.train.updates import check_end


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


def begun(
    source: StartingPoint | None, recipe: Recipe, task: Task, wanted: Path | None, stored: Manifest | None
) -> BegunFrom | None:
    """What --from names, for a new run; one that is there already has kept what it began from."""
    if source is None:
        return None
    if wanted is not None and stored is not None:
        check_beginning(wanted, stored, source)
        return None
    return find_beginning(source, recipe, task)


def check_stored(
    folder: Path, stored: Manifest, recipe: Recipe, task: Task, pretrained: Pretrained | None, mode: Mode
) -> tuple[str, int] | None:
    """Makes sure that a folder's run may be gone on with.

    Returns:
        What to say of one that is over, and the exit code; None if there is something to train.

    Raises:
        BadInputError: If it is another run, or its own schedule ends before the new end.
    """
    config, steps = recipe.model_dump(mode="json"), make_plan(recipe, task).steps
    check_resumable(folder, stored, config, device_kind(recipe), data_of(task, pretrained), mode, steps)
    if (over := ended(shown(folder), stored, config, mode, steps)) is None:
        check_end(folder, stored, task, steps)
    return over


def check_outside(recipe: Recipe) -> None:
    """Makes sure of what a run that begins needs outside of this process: trackers, and the port of metrics.

    Raises:
        BadInputError: If one doesn't answer, or is taken.
    """
    check_reachable(recipe.log.to)
    check_metrics_port(recipe.log)
