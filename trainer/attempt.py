"""One attempt at a run: from joining the other ranks to the summary, or to a checkpoint to go on from."""

import contextlib
import json
import math
import os
from pathlib import Path
from typing import Any

import torch

from trainer.between_windows import BetweenWindows, Progress, Requeue
from trainer.checkpoint import FOLDER
from trainer.checkpoint.background import BackgroundWriter
from trainer.checkpoint.folder import Checkpoint
from trainer.checkpoint.store import newest_good, remove_leftovers
from trainer.config import config_hash
from trainer.errors import EXIT_DONE, EXIT_REQUEUE, BadInputError
from trainer.limits import read_limits, threads_per_rank, workers_per_rank
from trainer.observe.console import warn
from trainer.observe.log import Meter, Sink
from trainer.parallel import World, check_agreement, joined_world
from trainer.recipe import Recipe
from trainer.resume import Mode, Stored, check_resumable, read_stored
from trainer.run import assemble, check_request, device_kind, make_task
from trainer.run_folder import check_space, make_manifest, open_folder, write_json
from trainer.state import load_tensors
from trainer.step import Training, take_figures
from trainer.summary import finish, introduce


def train_rank(recipe: Recipe, recipe_name: str, folder: Path, mode: Mode = "auto") -> int:
    """What each rank does.

    Args:
        recipe: The validated configuration.
        recipe_name: For the manifest.
        folder: The run folder; rank 0 writes to it. If it holds a run, that is gone on with.
        mode: Whether a changed configuration may go on.

    Returns:
        0 done, 75 stopped by a signal with a checkpoint to go on from.

    Raises:
        BadInputError: If the recipe can't be trained here.
        Stopped: If a signal stopped it and there is no checkpoint.
    """
    # Before the ranks meet, and so before rank 0 writes the manifest anew.
    stored = read_stored(folder)
    if stored is not None:
        check_resumable(folder, stored, recipe.model_dump(mode="json"), mode)
    kind = device_kind(recipe)
    with joined_world(kind, recipe.parallel.timeout_s) as world, contextlib.ExitStack() as stack:
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        limits = read_limits()
        threads = _threads(recipe, stored, mode, local_size)
        torch.set_num_threads(threads)
        task = make_task(recipe)
        check_request(recipe, task, world.size)
        if world.rank == 0:
            remove_leftovers(folder / FOLDER)
        found, skipped = _newest(folder, mode)
        at = found.step if found else 0
        check_agreement(
            f"{config_hash(recipe)} {len(task.train_data)} {len(task.evaluation_data)} from {at}", world
        )
        parts = assemble(recipe, task, world, workers_per_rank(limits, local_size))
        stack.callback(parts.loader.close)
        stack.callback(parts.evaluation_loader.close)
        t = parts.training
        progress = _go_on(t, found, world)
        notes = [*parts.notes, *_how_it_goes_on(stored, skipped, progress, world)]
        writer = display = None
        sinks: list[Sink] = []
        if world.rank == 0:
            manifest = make_manifest(
                recipe, recipe_name, world, t.share.plan, threads, task.describe(), notes
            )
            check_space(folder, t.model, copies=_copies(recipe))
            sinks = stack.enter_context(open_folder(folder, recipe, manifest, progress.window))
            display = introduce(manifest, parts, world, folder)
            stack.callback(display.close)
            sinks.append(display)
            if t.nonfinite is not None:
                sinks.append(t.nonfinite.explain)
            writer = BackgroundWriter(folder / FOLDER, recipe.checkpoint.keep, warn)
            stack.callback(writer.abandon)
        meter = Meter(t.share.plan, world.device, sinks, lambda: take_figures(t))
        meter.go_on(progress.row, progress.seconds, progress.samples)
        between = BetweenWindows(recipe, world, parts, meter, progress, writer, display)
        try:
            between.train()
        except Requeue as requeue:
            if display is not None:
                display.close()
                display.say(f"  {requeue}")
                _set_status(folder, "stopped", str(requeue))
            return EXIT_REQUEUE
        if world.rank == 0:
            if writer is not None:
                writer.finish()
            finish(folder, t, meter, task.metric, progress.figures, display)
    return EXIT_DONE


def _copies(recipe: Recipe) -> int:
    """How often the weights lie in a run folder, at most: of each checkpoint weights, average and moments."""
    averages = 1 if recipe.ema.decay else 0
    moments = 1 if recipe.optim.name == "sgd" else 2
    kept = recipe.checkpoint.keep + recipe.checkpoint.best + 1
    return (1 + averages) + kept * (1 + averages + moments)


def _newest(folder: Path, mode: Mode) -> tuple[Checkpoint | None, list[str]]:
    found, skipped = newest_good(folder / FOLDER)
    if skipped and found is None and mode != "force":
        raise BadInputError(
            f"{folder}: none of its checkpoints can be trusted ({skipped[0]}); bring one back, give another "
            "--out, or begin again by --resume force"
        )
    return found, skipped


def _threads(recipe: Recipe, stored: Stored | None, mode: Mode, local_size: int) -> int:
    """Intra-op threads: part of the arithmetic on a CPU, so those that the run was begun with."""
    threads = recipe.parallel.threads
    if threads != "auto":
        return threads
    if stored is not None and mode != "force":
        return stored.threads
    return threads_per_rank(read_limits(), local_size)


def _go_on(t: Training, found: Checkpoint | None, world: World) -> Progress:
    """Puts a checkpoint into the run."""
    if found is None:
        return Progress()
    state = found.state
    try:
        progress = Progress(
            found.step,
            int(state["row"]),
            [float(loss) for loss in state["losses"]],
            float(state["seconds"]),
            int(state["samples"]),
            {str(name): _number(figure) for name, figure in state["figures"].items()},
            (float(state["best"][0]), int(state["best"][1])) if state["best"] else None,
        )
        load_tensors(t, found.step, found.tensors)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadInputError(
            f"{found.path}: isn't a checkpoint of this run ({error}); give another --out, or remove it"
        ) from error
    # Another world has other parts of the sum; their total is the same.
    same = len(progress.losses) == world.size
    own = progress.losses[world.rank] if same else math.fsum(progress.losses) * (world.rank == 0)
    t.loss.fill_(own)
    return progress


def _how_it_goes_on(stored: Stored | None, skipped: list[str], progress: Progress, world: World) -> list[str]:
    notes = [f"checkpoint left out: {line}" for line in skipped]
    if stored is None:
        return notes
    if not progress.window:
        return [*notes, "begins again: the earlier attempt left no checkpoint"]
    notes.append(f"goes on after window {progress.window}")
    if stored.world_size != world.size:
        notes.append(
            f"on {world.size} ranks instead of {stored.world_size}: the same samples in the same windows, "
            "but sums in another order"
        )
    return notes


def _number(figure: Any) -> float:
    return math.nan if figure is None else float(figure)


def _set_status(folder: Path, status: str, reason: str) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    write_json(folder / "manifest.json", {**manifest, "status": status, "reason": reason})
