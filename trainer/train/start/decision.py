"""Decides how a run starts: new, from another run's checkpoint, resumed, or not at all, as it is finished.

Rank 0 decides before it makes or locks the run folder, and again if another process has trained there
meanwhile.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.recipe import Recipe
from trainer.errors import EXIT_DONE, EXIT_FAILED, BadInputError
from trainer.host.here import path_shown
from trainer.host.latest import LATEST
from trainer.runs.differences import differences, of_end, other_arithmetic, other_data
from trainer.runs.manifest import BegunFrom, Manifest, Pretrained, check_current, read_run, read_stored
from trainer.tasks import Task
from trainer.train.components.task import data_of, device_kind, make_plan, task_changes
from trainer.train.options import Mode, StartingPoint
from trainer.train.starting_weights import find_beginning

_SHOWN = 4


@dataclass(frozen=True)
class New:
    """New run, with its own initial weights."""


@dataclass(frozen=True)
class From:
    """New run that begins from another run's checkpoint."""

    checkpoint: BegunFrom


@dataclass(frozen=True)
class Resume:
    """Run that resumes after earlier attempts, with their manifest."""

    stored: Manifest


@dataclass(frozen=True)
class Finished:
    """Run with nothing left to train: a line for the user, and the exit code."""

    line: str
    code: int


Decision = New | From | Resume | Finished


def decide(
    recipe: Recipe,
    folder: Path | None,
    task: Task,
    *,
    pretrained: Pretrained | None,
    resume: Mode,
    source: StartingPoint | BegunFrom | None,
) -> Decision:
    """Decides how a run starts.

    Args:
        recipe: The configuration.
        folder: The run folder; None for a new one.
        task: The recipe's task.
        pretrained: Source and hash of the pretrained weights, or None.
        resume: The flag --resume.
        source: The checkpoint that `--init-from` names, or that the launcher found for it; None without it.

    Raises:
        BadInputError: If the folder holds another run, or `--init-from` names no checkpoint that fits.
    """
    stored = None if folder is None else read_stored(folder)
    if folder is None or stored is None:
        if isinstance(source, StartingPoint):
            source = find_beginning(source, recipe, task)
        return New() if source is None else From(source)
    if isinstance(source, StartingPoint):
        check_beginning(folder, stored, source)
    config, plan = recipe.model_dump(mode="json"), make_plan(recipe, task)
    data = data_of(recipe, task, pretrained)
    changes = task_changes(stored, task) if resume == "auto" else []
    check_resumable(folder, stored, config, device_kind(recipe), data, resume, plan.steps, changes)
    return ended(path_shown(folder), stored, config, resume, plan.steps) or Resume(stored)


def check_resumable(
    folder: Path,
    stored: Manifest,
    config: Mapping[str, Any],
    device: str,
    data: Mapping[str, str],
    mode: Mode,
    steps: int,
    changes: Sequence[str] = (),
) -> None:
    """Checks that the run in a folder may be resumed with this configuration, device and data.

    Args:
        folder: The run folder.
        stored: Its manifest.
        config: The configuration now, as JSON values.
        device: "cpu" or "cuda".
        data: Fingerprints of the data now, from `data_of`.
        mode: The flag --resume.
        steps: Number of steps at which the run is to end now; more than before extend a finished run.
        changes: Changes in its custom task, from `task_changes`.

    Raises:
        BadInputError: If --resume never forbids it, or anything differs without --resume force.
    """
    if mode == "never":
        raise BadInputError(f"{folder}: holds a run already; give another folder or remove it")
    check_current(folder, stored)
    differing = differences(stored.config, config, stored.redacted)
    if (stored.status == "finished" or stored.extended) and steps > stored.last_step:
        differing = [line for line in differing if not of_end(line)]
    if stored.device.kind != device:
        differing.append(f"trained on {stored.device.kind}, now {device}")
    differing += [*changes, *other_data(stored, data)]
    if stored.status != "finished" or steps > stored.last_step:
        differing += other_arithmetic(stored.arithmetic)
    if differing and mode != "force":
        more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        raise BadInputError(
            f"{folder}: holds a run with another configuration ({'; '.join(differing[:_SHOWN])}{more}); "
            f"leave these out, train in another folder, or resume with them by --out {folder} --resume force"
        )


def check_beginning(folder: Path, stored: Manifest, source: StartingPoint) -> None:
    """Checks that a folder's run began from the checkpoint that `--init-from` names, which may be gone now.

    Raises:
        BadInputError: If it began in another way.
    """
    begun, remedy = stored.begun_from, "leave --init-from out to go on with it, or give another --out"
    if begun is None:
        raise BadInputError(
            f"--init-from {source.word}: {folder} holds a run that began without --init-from; {remedy}"
        )
    if source.word.partition("@")[0] == LATEST:  # it named another run then, and names this one now
        return
    try:
        same = read_run(source.run).manifest.run_id == begun.run_id
    except BadInputError:
        same = True
    if not same or (source.which.isdigit() and int(source.which) != begun.step):
        raise BadInputError(
            f"--init-from {source.word}: {folder} holds a run that began from {begun.folder}, step "
            f"{begun.step}; {remedy}"
        )


def ended(
    folder: Path, stored: Manifest, config: Mapping[str, Any], mode: Mode, steps: int
) -> Finished | None:
    """Returns the end of a run that has nothing left to train; None if it can be resumed.

    Args:
        folder: The run folder.
        stored: Its manifest.
        config: The configuration now, as JSON values.
        mode: The flag --resume.
        steps: Number of steps at which the run is to end now; more than before extend it.

    Raises:
        BadInputError: If the run is to be extended but stopped early, out of patience.
    """
    later = any(map(of_end, differences(stored.config, config, stored.redacted)))
    extended = (mode == "force" or later) and steps > stored.last_step
    if stored.status == "finished" and extended:
        spent = stored.out_of_patience
        if 0 < config["evaluation"]["patience"] <= spent:
            if later:
                raise BadInputError(
                    f"{folder}: ended at step {stored.last_step} out of patience ({spent} evaluations in a "
                    f"row were no better), which more steps don't change: raise evaluation.patience above "
                    f"{spent}, too, or set it to 0"
                )
            extended = False
    if stored.status == "finished" and not extended:
        return Finished(f"{folder} is finished already; nothing to do", EXIT_DONE)
    if stored.status == "diverged" and mode != "force":
        remedy = "resume from its newest checkpoint, with what you changed, by --resume force"
        return Finished(f"{folder} is diverged already; {remedy}", EXIT_FAILED)
    return None
