"""Initial weights of a run: from another run's checkpoint (`--init-from`), or from `model.pretrained`.

A run takes from a checkpoint the weights and buffers, their average, and the optimizer's state with the loss
scale, where they fit; steps, epochs, the order of the data and the schedule start at 0. The checkpoint is
kept in the run folder (by hard links, where possible): the other run isn't needed again.

The file of `model.pretrained` is found and hashed once, before any rank starts, also when a run is resumed.
A run with a checkpoint, its own or that of `--init-from`, takes all weights from there: its pretrained
weights aren't read any more, and may be gone.
"""

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

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
    verify_checkpoint,
)
from trainer.checkpoint.store import listing
from trainer.config.models import HF
from trainer.config.recipe import Recipe
from trainer.errors import BadInputError, writing
from trainer.host import files
from trainer.host.here import path_shown
from trainer.models.finetune import fine_tune
from trainer.models.hf_files import files_hash
from trainer.models.pretrained import Weights, find_weights
from trainer.models.weights import regular
from trainer.runs.differences import differences, other_data
from trainer.runs.folder import KEPT, checkpoints_of
from trainer.runs.manifest import BegunFrom, Manifest, Pretrained, read_run
from trainer.tasks import Task
from trainer.train.components.checkpoint_choice import chosen_checkpoint
from trainer.train.components.operations import shapes_only
from trainer.train.components.task import WEIGHTS, data_of, task_changes
from trainer.train.options import Mode, StartingPoint
from trainer.train.provenance import file_hash
from trainer.train.state import Run, fitting, load_tensors, own_tensors, read_numbers, tensors_of

_SHOWN = 6


def find_beginning(source: StartingPoint, recipe: Recipe, task: Task) -> BegunFrom:
    """Looks up and verifies the checkpoint that `--init-from` names.

    Raises:
        BadInputError: If there is no such run or checkpoint, it is damaged, or of another architecture.
    """
    word = f"--init-from {source.word}"
    try:
        run = read_run(source.run)
    except BadInputError as error:
        raise BadInputError(f"--init-from {error}") from error
    step, path = chosen_checkpoint(source.run, source.which, word)
    path = path.absolute()  # the code of a task, below, may change the current folder
    try:
        verify_checkpoint(path)
        state, digest = read_state(path), sums_hash(path)
        if reason := run.manifest.foreign(state):
            raise BadInputError(f"{word}: {path.name}: {reason}; give RUN@STEP")
        model = shapes_only(task)
        fine_tune(model, recipe.model)
        odd = _first_difference(path, model)
    except (Damaged, Unreadable) as error:
        others = [str(entry.step) for entry in listing(checkpoints_of(source.run)) if entry.path != path]
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
        # Without that run's own initial weights: only the weights that it trained are taken.
        differs=[
            *differences(before, config, run.manifest.redacted),
            *task_changes(run.manifest, task),
            *(
                line
                for line in other_data(run.manifest, data_of(recipe, task))
                if not line.startswith(WEIGHTS)
            ),
        ],
    )


def _first_difference(path: Path, model: nn.Module) -> str:
    """Names the first tensor of a model that differs in a checkpoint; empty if none does."""
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
    """Keeps the checkpoint that a new run begins from in its folder; replaces one of a start that was killed.

    Raises:
        BadInputError: If the folder can't be written.
    """
    kept = folder / KEPT
    with writing(str(kept), "mend that, or give another run folder"):
        files.remove(kept)
        if begun_from is None:
            return
        name = folder_name(begun_from.step)
        source = _in_run(Path(begun_from.folder), begun_from.step)
        (kept / name).mkdir(parents=True)
        for file in source.iterdir():
            if not files.oddity(file, folder=False):  # else it is none of the checkpoint's
                _linked_or_copied(file, kept / name / file.name)
        for written in (kept / name, kept, folder):
            files.sync_folder(written)


def _in_run(run: Path, step: int) -> Path:
    folder = checkpoints_of(run)
    there = next((entry.path for entry in listing(folder) if entry.step == step), None)
    return there or folder / folder_name(step)


def _linked_or_copied(file: Path, to: Path) -> None:
    """Hard-links a file, or copies it: files of checkpoints are never changed."""
    try:
        os.link(file, to)
    except OSError:
        shutil.copyfile(file, to)
        with to.open("rb") as copy:
            os.fsync(copy.fileno())


def begin_from(run: Run, folder: Path, begun_from: BegunFrom) -> list[str]:
    """Loads the checkpoint that a run begins from; returns notes that list what was taken.

    Raises:
        BadInputError: If the checkpoint is gone or damaged, or has another hash than at the first start.
    """
    kept = folder / KEPT / folder_name(begun_from.step)
    path = kept if kept.exists() else _in_run(Path(begun_from.folder), begun_from.step)
    remedy = f"bring back {kept}, or begin again in another run folder"
    try:
        # A rank of a sharded run reads only its rows, later.
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
        f"begins from {path_shown(Path(begun_from.folder))}, step {begun_from.step}: {taken}; steps, data "
        "order and schedule start at 0",
        other if differs else "configuration and data are as they were there",
    ]


def take_over(run: Run, found: Checkpoint) -> str:
    """Loads another run's checkpoint into a run that has just been built; returns a list of what was taken.

    Raises:
        KeyError: If a part of the checkpoint is missing.
        ValueError: If a tensor has another name, shape or dtype; no tensor of the run is changed then.
    """
    state, theirs = run.state, own_tensors(run.state, found.tensors)
    built, saved = tensors_of(state)["optimizer"], theirs["optimizer"]
    fitted = fitting(state, saved)
    average = theirs.get("ema", {})
    tensors = {
        "model": theirs["model"],
        # Counts of steps and updates stay 0.
        "optimizer": {**built, **fitted},
    }
    if state.average is not None:  # the weight itself where the other run had it frozen
        of_all = {**theirs["model"], **average}
        tensors["ema"] = {name: of_all[name].to(one.dtype) for name, one in state.average.tensors.items()}
    load_tensors(state, 0, tensors)
    if state.average is not None and average:  # its warm-up is over: the first steps are not to replace it
        state.average.before = read_numbers(found.step, found.state).averaged_before + int(saved["updates"])
    taken = ["the weights"]
    if state.average is not None:
        taken.append("their average" if average else "an average that begins with them")
    elif average:
        taken.append("not their average (ema.decay=0)")
    return ", ".join([*taken, *_taken_of_optimizer(state.model, saved, fitted)])


def _taken_of_optimizer(
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


# --- model.pretrained ---


def begins_fresh(folder: Path | None, stored: Manifest | None, mode: Mode) -> bool:
    """True if an attempt starts from initial weights, not from a checkpoint.

    Args:
        folder: The run folder; None for a new one.
        stored: The manifest of earlier attempts in it, or None.
        mode: The flag --resume.
    """
    if folder is None or stored is None:
        return True
    # The first two train nothing or extend a checkpoint; the third has that of another run.
    over = stored.status == "finished" or (stored.status == "diverged" and mode != "force")
    if over or stored.begun_from is not None:
        return False
    try:
        entries = listing(checkpoints_of(folder))
    except OSError:  # it ends the attempt later, with its own message
        return False
    # Where all are damaged or foreign only `force` begins again.
    return not entries or (mode == "force" and not any(_good(entry.path, stored) for entry in entries))


def _good(checkpoint: Path, stored: Manifest) -> bool:
    try:
        verify_checkpoint(checkpoint)
        return stored.foreign(read_state(checkpoint)) is None
    except Unreadable:  # as above
        return True
    except Damaged:
        return False


def resolve_pretrained(
    recipe: Recipe,
    stored: Manifest | None,
    folder: Path | None = None,
    mode: Mode = "auto",
    source: StartingPoint | None = None,
) -> tuple[Recipe, Pretrained | None, bool]:
    """Finds the pretrained weights of a recipe, and fetches them if needed; not where a checkpoint is taken.

    Args:
        recipe: As it was given.
        stored: The manifest of earlier attempts: a resumed run keeps the commit that it began with, even if
            the branch that was named has moved.
        folder: The run folder.
        mode: The flag --resume.
        source: The checkpoint of another run that a new run begins from.

    Returns:
        The recipe, with a commit in place of a branch; source and hash of the weights, or None; and True if
        ranks are to read them.

    Raises:
        BadInputError: If the weights can't be found or fetched, or their hash isn't the published one.
    """
    fresh, known = begins_fresh(folder, stored, mode), stored
    if stored is None and source is not None:
        fresh = False
        with suppress(BadInputError):  # reported later, as an error of --init-from
            known = read_run(source.run).manifest
    key = "name" if recipe.model.name.startswith(HF) else "pretrained"
    asked = getattr(recipe.model, key)
    if asked is None:
        return recipe, None, fresh
    if not fresh and known is not None and (before := known.pretrained) is not None:
        exact = known.config.get("model", {}).get(key)
        if str(asked) in (before.source, exact):
            if before.revision is None and (isinstance(asked, Path) or key == "name"):
                with suppress(BadInputError, OSError):  # it may be gone; a changed file is reported
                    now = _hash_of(find_weights(recipe.model))
                    before = before.model_copy(update={"sha256": now})
                return recipe, before, fresh
            model = recipe.model.model_copy(update={key: exact})
            return recipe.model_copy(update={"model": model}), before, fresh
    return *_found(recipe, stored), fresh


def _found(recipe: Recipe, stored: Manifest | None) -> tuple[Recipe, Pretrained]:
    model, before = recipe.model, stored.pretrained if stored is not None else None
    key = "name" if model.name.startswith(HF) else "pretrained"
    asked = str(getattr(model, key))
    if before is not None and before.source == asked and before.revision and "@" in asked:
        model = model.model_copy(update={key: f"{asked.rpartition('@')[0]}@{before.revision}"})
    found = find_weights(model)
    assert found is not None
    try:
        sha256 = _hash_of(found)
    except OSError as error:
        raise BadInputError(
            f"model.pretrained: can't read {found.file} ({error.strerror}); give another file, "
            "hub:ORG/NAME@REVISION or torchvision:WEIGHTS"
        ) from error
    if found.sha256 not in (None, sha256):
        raise BadInputError(
            f"model.pretrained={asked}: {found.file.resolve()} isn't what was fetched and checked (another "
            "SHA-256): remove it, and it is fetched again"
        )
    model = model.model_copy(update={key: found.exact})
    # A run that is resumed without its recipe names the commit: its manifest keeps the name of the branch.
    same = before is not None and found.revision is not None and found.revision == before.revision
    source = before.source if before is not None and same else asked
    what = Pretrained(source=source, revision=found.revision, sha256=sha256)
    return recipe.model_copy(update={"model": model}), what


def _hash_of(found: Weights | None) -> str:
    """SHA-256 of a file of weights; for a folder, of its configuration and weights together."""
    assert found is not None
    return files_hash(found.file) if found.file.is_dir() else file_hash(regular(found.file))
