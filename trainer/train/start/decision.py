"""Decides how a run starts: new, from another run's checkpoint, resumed, or not at all, as it is finished.

The launcher, ranks without one and `fit` decide by this before a start; each rank does again once its run
folder is locked, as another process may have trained there meanwhile.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.recipe import Recipe
from trainer.errors import EXIT_DONE, EXIT_FAILED, BadInputError
from trainer.host.here import path_shown
from trainer.host.latest import LATEST
from trainer.runs.differences import differences, of_end, other_arithmetic, other_data
from trainer.runs.manifest import BegunFrom, Manifest, Pretrained, read_run, read_stored
from trainer.tasks import Task
from trainer.train.components.task import data_of, device_kind, make_plan
from trainer.train.options import Mode, StartingPoint
from trainer.train.starting_weights import find_beginning

_SHOWN = 4


@dataclass(frozen=True)
class New:
    """A run that begins with its own weights."""


@dataclass(frozen=True)
class From:
    """A run that begins from another's checkpoint."""

    checkpoint: BegunFrom


@dataclass(frozen=True)
class Resume:
    """A run that goes on where earlier attempts stopped, with what they left."""

    stored: Manifest


@dataclass(frozen=True)
class Finished:
    """A run with nothing left to train: what to say of it, and the exit code."""

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
        folder: The run folder; None if it is to be a new one.
        source: What `--from` names; or what was found by it, where the launcher has decided.

    Raises:
        BadInputError: If the folder holds another run, or `--from` names none that fits.
    """
    stored = None if folder is None else read_stored(folder)
    if folder is None or stored is None:
        if isinstance(source, StartingPoint):
            source = find_beginning(source, recipe, task)
        return New() if source is None else From(source)
    if isinstance(source, StartingPoint):
        check_beginning(folder, stored, source)
    config, plan = recipe.model_dump(mode="json"), make_plan(recipe, task)
    data = data_of(task, pretrained, plan.draws)
    check_resumable(folder, stored, config, device_kind(recipe), data, resume, plan.steps)
    return ended(path_shown(folder), stored, config, resume, plan.steps) or Resume(stored)


def check_resumable(
    folder: Path,
    stored: Manifest,
    config: Mapping[str, Any],
    device: str,
    data: Mapping[str, str],
    mode: Mode,
    steps: int,
) -> None:
    """Makes sure that a folder's run may be gone on with by this configuration, on this device and data.

    Args:
        steps: At which it is to end now: a finished run may be extended.

    Raises:
        BadInputError: If the user forbade it, or something differs and that wasn't forced.
    """
    if mode == "never":
        raise BadInputError(f"{folder}: holds a run already; give another folder or remove it")
    differing = differences(stored.config, config)
    if (stored.status == "finished" or stored.extended) and steps > stored.steps:
        differing = [line for line in differing if not of_end(line)]
    if stored.device.kind != device:
        differing.append(f"trained on {stored.device.kind}, now {device}")
    differing += other_data(stored, data)
    if stored.status != "finished" or steps > stored.steps:
        differing += other_arithmetic(stored.arithmetic)
    if differing and mode != "force":
        more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        raise BadInputError(
            f"{folder}: holds a run with another configuration ({'; '.join(differing[:_SHOWN])}{more}); "
            f"leave that out, train in another folder, or go on with it by --out {folder} --resume force"
        )


def check_beginning(folder: Path, stored: Manifest, source: StartingPoint) -> None:
    """Makes sure that a folder's run began from what `--from` names; where that is gone now, it isn't needed.

    Raises:
        BadInputError: If it began otherwise.
    """
    begun, remedy = stored.begun_from, "leave --from out to go on with it, or give another --out"
    if begun is None:
        raise BadInputError(f"--from {source.word}: {folder} holds a run that began anew; {remedy}")
    if source.word.partition("@")[0] == LATEST:  # which was another run then: since then it is this one
        return
    try:
        same = read_run(source.run).manifest.run_id == begun.run_id
    except BadInputError:
        same = True
    if not same or (source.which.isdigit() and int(source.which) != begun.step):
        raise BadInputError(
            f"--from {source.word}: {folder} holds a run that began from {begun.folder}, step {begun.step}; "
            f"{remedy}"
        )


def ended(
    folder: Path, stored: Manifest, config: Mapping[str, Any], mode: Mode, steps: int
) -> Finished | None:
    """A run that is through; None if it can be gone on with.

    Args:
        steps: At which it is to end now: a later end extends it. (One that ran out of patience ended before.)

    Raises:
        BadInputError: If a later end doesn't help, as it ran out of patience.
    """
    later = any(map(of_end, differences(stored.config, config)))
    extended = (mode == "force" or later) and steps > stored.steps
    if stored.status == "finished" and extended:
        spent = stored.out_of_patience
        if 0 < config["evaluation"]["patience"] <= spent:
            if later:
                raise BadInputError(
                    f"{folder}: ended at step {stored.steps} out of patience ({spent} evaluations in a row "
                    f"were no better), which more steps don't change: raise evaluation.patience above "
                    f"{spent}, too, or set it to 0"
                )
            extended = False
    if stored.status == "finished" and not extended:
        return Finished(f"{folder} is finished already; nothing to do", EXIT_DONE)
    if stored.status == "diverged" and mode != "force":
        remedy = "go on from its newest checkpoint, with what you changed, by --resume force"
        return Finished(f"{folder} is diverged already; {remedy}", EXIT_FAILED)
    return None
