"""A new run that begins from a checkpoint of another: `--from RUN`.

Taken are the weights and buffers, their average, and the optimizer's state with the loss scale, where they
have a place. Steps, epochs, the order of the data and the schedule begin anew. The run folder keeps the
checkpoint (by hard links, where it can): the other run isn't needed again.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.checkpoint import FOLDER
from trainer.checkpoint.folder import (
    Checkpoint,
    Damaged,
    Unreadable,
    folder_name,
    look_up,
    read,
    read_slots,
    read_state,
    sums_hash,
    verify,
)
from trainer.checkpoint.store import listing
from trainer.config.recipe import Recipe
from trainer.errors import BadInputError
from trainer.host import files
from trainer.host.here import shown
from trainer.models.finetune import fine_tune
from trainer.tasks import Task
from trainer.train.manifest import BegunFrom, RunFolder, read_run
from trainer.train.prepare import shapes_only
from trainer.train.resume import StartingPoint, differences, other_data
from trainer.train.run import WEIGHTS, data_of
from trainer.train.run_folder import KEPT
from trainer.train.state import Run, fitting, load_tensors, own_tensors, tensors_of

_SHOWN = 6


def find_beginning(source: StartingPoint, recipe: Recipe, task: Task) -> BegunFrom:
    """Looks up and verifies what a new run is to begin from.

    Raises:
        BadInputError: If there is no such run or checkpoint, it is damaged, or of another architecture.
    """
    word = f"--from {source.word}"
    try:
        run = read_run(source.run)
    except BadInputError as error:
        raise BadInputError(f"{word}: {error}") from error
    step, path = _chosen(run, source)
    path = path.absolute()  # the code of a task, below, may go to another folder
    try:
        verify(path)
        state, digest = read_state(path), sums_hash(path)
        if reason := run.manifest.foreign(state):
            raise BadInputError(f"{word}: {path.name}: {reason}; give RUN@STEP")
        model = shapes_only(task)
        fine_tune(model, recipe.model)
        odd = _first_difference(path, model)
    except (Damaged, Unreadable) as error:
        others = [str(entry.step) for entry in listing(source.run / FOLDER) if entry.path != path]
        there = f"give RUN@STEP of another: {', '.join(others)}" if others else "bring it back"
        raise BadInputError(f"{word}: {path.name}: {error}; {there}") from error
    if odd:
        raise BadInputError(
            f"{word}: {path.name} is of another model ({odd}): choose the model that it is of; "
            f"model.pretrained=FILE.safetensors with model.reinit takes a part of its weights"
        )
    config, before = recipe.model_dump(mode="json"), run.manifest.config
    pretrained = config["model"]["pretrained"]
    if pretrained is not None and pretrained != before.get("model", {}).get("pretrained"):
        raise BadInputError(
            f"{word} takes all weights from there, and model.pretrained={pretrained} names others; leave one "
            "out"
        )
    return BegunFrom(
        folder=str(source.run.absolute()),
        run_id=run.manifest.run_id,
        step=step,
        hash=digest,
        # Not by what weights that run began with: what it made of them is taken.
        differs=[
            *differences(before, config),
            *(line for line in other_data(run.manifest, data_of(task)) if not line.startswith(WEIGHTS)),
        ],
    )


def _chosen(run: RunFolder, source: StartingPoint) -> tuple[int, Path]:
    """The checkpoint that is meant, and its step; whether it is sound, nobody has looked."""
    word, folder = f"--from {source.word}", source.run / FOLDER
    try:
        entries = listing(folder)
    except OSError as error:
        raise BadInputError(f"{word}: {folder} can't be read ({error.strerror}); mend that") from error
    if not entries:
        raise BadInputError(f"{word}: {run.path} holds no checkpoint; train it with checkpoint.every above 0")
    if source.which == "last":
        return entries[0].step, entries[0].path
    steps = ", ".join(str(entry.step) for entry in entries)
    step, what = source.which, f"no checkpoint of step {source.which}"
    if source.which == "best":
        try:
            best = read_state(entries[0].path).get("best")
        except (Damaged, Unreadable) as error:
            raise BadInputError(
                f"{word}: {entries[0].path.name}, which says what was best: {error}; give RUN@STEP: {steps}"
            ) from error
        if not best:
            raise BadInputError(
                f"{word}: nothing was evaluated before its newest checkpoint; give {run.path}"
            )
        step, what = (
            str(best[1]),
            f"the best one, of step {best[1]}, wasn't kept (checkpoint.best=true keeps it)",
        )
    found = next(((entry.step, entry.path) for entry in entries if entry.step == int(step)), None)
    if found is None:
        raise BadInputError(f"{word}: {what}; there are those of step {steps}")
    return found


def _first_difference(path: Path, model: nn.Module) -> str:
    """The first tensor of a model that a checkpoint has otherwise, or nothing."""
    ours: dict[str, Any] = model.state_dict()
    theirs = {slot.name: slot for slot in read_slots(path, "model")}
    for name, tensor in ours.items():
        if (slot := theirs.get(name)) is None:
            return f"it has no {name}"
        if list(tensor.shape) != slot.shape or tensor.dtype != slot.dtype:
            there, here = (
                f"{str(kind).removeprefix('torch.')} {list(shape)}"
                for shape, kind in ((slot.shape, slot.dtype), (tensor.shape, tensor.dtype))
            )
            return f"{name} is {there}, and {here} here"
    more = next((name for name in theirs if name not in ours), None)
    return "" if more is None else f"its {more} isn't in the model here"


def keep_beginning(folder: Path, begun_from: BegunFrom | None) -> None:
    """Keeps what a new run begins from in its folder, in place of what a start left that was killed.

    Raises:
        BadInputError: If it can't be written.
    """
    kept = folder / KEPT
    try:
        files.remove(kept)
        if begun_from is None:
            return
        name = folder_name(begun_from.step)
        source = _in_run(Path(begun_from.folder), begun_from.step)
        (kept / name).mkdir(parents=True)
        for file in source.iterdir():
            _linked_or_copied(file, kept / name / file.name)
        for written in (kept / name, kept, folder):
            files.sync_folder(written)
    except OSError as error:
        raise BadInputError(
            f"{kept}: can't be written ({error.strerror}); mend that, or give another --out"
        ) from error


def _in_run(run: Path, step: int) -> Path:
    there = next((entry.path for entry in listing(run / FOLDER) if entry.step == step), None)
    return there or run / FOLDER / folder_name(step)


def _linked_or_copied(file: Path, to: Path) -> None:
    """Files of checkpoints are never changed, so two names for one do."""
    try:
        os.link(file, to)
    except OSError:
        shutil.copyfile(file, to)
        with to.open("rb") as copy:
            os.fsync(copy.fileno())


def begin_from(run: Run, folder: Path, begun_from: BegunFrom) -> list[str]:
    """Puts the checkpoint that a run begins from into it; returns lines that say what was taken.

    Raises:
        BadInputError: If it is gone, or can't be trusted any more.
    """
    kept = folder / KEPT / folder_name(begun_from.step)
    path = kept if kept.exists() else _in_run(Path(begun_from.folder), begun_from.step)
    remedy = f"bring back {kept}, or begin again in another --out"
    try:
        # A rank of a sharded run reads its rows alone, later.
        found = read(path) if run.state.rows is None else look_up(path)
        if sums_hash(path) != begun_from.hash:
            raise Damaged("isn't the checkpoint that the run began from (another hash)")
        taken = take_over(run, found)
    except (Damaged, Unreadable, KeyError, ValueError) as error:
        raise BadInputError(f"{path}: {error}; {remedy}") from error
    differs = begun_from.differs
    more = f"; and {len(differs) - _SHOWN} more, see manifest.json" if len(differs) > _SHOWN else ""
    other = f"other than there: {'; '.join(differs[:_SHOWN])}{more}"
    return [
        f"begins from {shown(Path(begun_from.folder))}, step {begun_from.step}: {taken}; steps, data order "
        "and schedule begin anew",
        other if differs else "configuration and data are as they were there",
    ]


def take_over(run: Run, found: Checkpoint) -> str:
    """Puts another run's checkpoint into a run that has just been built; says what was taken.

    Raises:
        KeyError: If a part is missing.
        ValueError: If a tensor has another name, shape or type; none has been changed then.
    """
    state, theirs = run.state, own_tensors(run.state, found.tensors)
    built, saved = tensors_of(state)["optimizer"], theirs["optimizer"]
    fitted = fitting(state, saved)
    average = theirs.get("ema", {})
    tensors = {
        "model": theirs["model"],
        # Counts stay those of a run that begins.
        "optimizer": {**built, **fitted},
    }
    if state.average is not None:  # with the weight itself of what was frozen there
        of_all = {**theirs["model"], **average}
        tensors["ema"] = {name: of_all[name] for name in state.average.tensors}
    load_tensors(state, 0, tensors)
    if state.average is not None and average:  # it has found its pace: it isn't to forget what it was
        state.average.before = int(found.state.get("averaged_before", 0)) + int(saved["updates"])
    told = ["the weights"]
    if state.average is not None:
        told.append("their average" if average else "an average that begins with them")
    elif average:
        told.append("not their average (ema.decay=0)")
    return ", ".join([*told, *_told_of_optimizer(state.model, saved, fitted)])


def _told_of_optimizer(
    model: nn.Module, saved: Mapping[str, torch.Tensor], fitted: Mapping[str, torch.Tensor]
) -> list[str]:
    names = {name for name, _ in model.named_parameters()}
    there, here = (len({key.rpartition("/")[0] for key in one} & names) for one in (saved, fitted))
    if not there:
        return []
    some = (
        f"the optimizer's state of {here} of {there} tensors" if here else "no state of its other optimizer"
    )
    scale = ["the loss scale"] if any(key.startswith("scaler/") for key in fitted) else []
    return ["the optimizer's state" if here == there else some, *scale]
