"""One attempt at a run: from joining the other ranks to the summary, or to a checkpoint to go on from."""

import contextlib
import json
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from trainer.agreement import NOTHING, Agreement
from trainer.checkpoint.background import BackgroundWriter, stage
from trainer.checkpoint.folder import Checkpoint
from trainer.checkpoint.store import newest_good, remove_leftovers
from trainer.config import config_hash
from trainer.errors import EXIT_DONE, EXIT_REQUEUE, BadInputError
from trainer.evaluate import evaluate
from trainer.limits import read_limits, threads_per_rank, workers_per_rank
from trainer.loop import train
from trainer.observe.console import Display, warn
from trainer.observe.log import Meter, Sink
from trainer.parallel import World, check_agreement, joined_world, sum_over_ranks
from trainer.plan import Plan
from trainer.preempt import Stopped, requested
from trainer.recipe import Recipe
from trainer.resume import Mode, Stored, check_resumable, read_stored
from trainer.run import Parts, assemble, check_request, device_kind, make_task
from trainer.run_folder import check_space, make_manifest, open_folder, write_json
from trainer.state import load_tensors, tensors_of
from trainer.step import Training, take_figures
from trainer.summary import finish, introduce

CHECKPOINTS = "checkpoints"


class Requeue(Exception):  # noqa: N818  (the outcome of a request, not an error)
    """A signal stopped this run, and it can be gone on with."""


@dataclass
class Progress:
    """How far a run has come, besides its tensors: what a checkpoint keeps as JSON.

    Attributes:
        window: Windows done.
        row: Windows at the last row of figures.
        losses: Of each rank, the sum of losses since then.
        seconds: Time of the windows that were timed.
        samples: Samples in them.
        figures: The last evaluation.
        best: The best evaluation's metric, and its window.
    """

    window: int = 0
    row: int = 0
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    samples: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    best: tuple[float, int] | None = None


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
            remove_leftovers(folder / CHECKPOINTS)
        found, skipped = newest_good(folder / CHECKPOINTS)
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
            writer = BackgroundWriter(folder / CHECKPOINTS, recipe.checkpoint.keep, warn)
            stack.callback(writer.abandon)
        meter = Meter(t.share.plan, world.device, sinks, lambda: take_figures(t))
        meter.go_on(progress.row, progress.seconds, progress.samples)
        attempt = Attempt(recipe, world, parts, meter, progress, writer, display)
        try:
            attempt.train()
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


class Attempt:
    """What happens between two windows: evaluation, checkpoints, stops."""

    def __init__(
        self,
        recipe: Recipe,
        world: World,
        parts: Parts,
        meter: Meter,
        progress: Progress,
        writer: BackgroundWriter | None,
        display: Display | None,
    ) -> None:
        """Starts at the progress; rank 0 has the writer and the display."""
        self._recipe, self._world, self._parts = recipe, world, parts
        self._meter, self._progress, self._writer, self._display = meter, progress, writer, display
        self._training, self._plan = parts.training, parts.training.share.plan
        self._agreement = Agreement(world.control or world.group, progress.window)
        self._every, self._keeps_best = recipe.checkpoint.every, recipe.checkpoint.best
        self._windows = self._plan.windows
        self._began = time.monotonic()
        self._set_due()
        self._start = progress.window
        self._durable = progress.window > 0
        self._is_best = False

    def train(self) -> None:
        """Trains from the progress to the end.

        Raises:
            Requeue: After a signal, with a checkpoint to go on from.
            Stopped: After a signal, without one.
        """
        start = self._progress.window
        windows = range(start, self._plan.windows)
        batches = self._training.share.batches(start)
        train(
            self._training,
            self._parts.loader(batches),
            windows,
            self._meter,
            self._recipe.log.every,
            _evaluation_due(self._recipe.evaluate_every, self._plan),
            self._evaluate,
            self.window_done,
            self._recipe.compile.warm_up,
        )

    def _evaluate(self, done: int) -> None:
        t, parts = self._training, self._parts
        model = t.model if t.average is None else t.average.averaged()
        figures = evaluate(
            t.task,
            model,
            parts.evaluation_loader,
            parts.evaluation_share,
            self._world,
            self._recipe.precision,
        )
        self._meter.deliver()
        epoch = round(self._plan.epoch_at(done), 4)
        self._meter.emit({"kind": "evaluation", "window": done, "epoch": epoch, **figures})
        progress = self._progress
        progress.figures = figures
        metric = figures[t.task.metric]
        score = -metric if t.task.metric == "loss" else metric
        self._is_best = math.isfinite(score) and (progress.best is None or score > progress.best[0])
        if self._is_best:
            progress.best = (score, done)

    def window_done(self, done: int) -> None:
        """Shows how far it is, keeps what is due, and stops if all ranks agreed to."""
        if self._display is not None:
            self._display.window_done(done)
            if self._parts.compiled and done == self._start + self._recipe.compile.warm_up:
                self._display.say(f"  compiled in {time.monotonic() - self._began:.0f} s")
        overdue = time.monotonic() > self._due_at
        decision = self._agreement.after(done, requested() or 0, overdue)
        due = self._every > 0 and done % self._every == 0
        if not (due or decision is not NOTHING or self._is_best) or done == self._windows:
            return
        if due or decision.signal or decision.save or (self._keeps_best and self._is_best):
            self._save(done)
        self._is_best = False
        if decision.signal:
            self._stop(decision.signal, done)

    def _set_due(self) -> None:
        seconds = self._recipe.checkpoint.minutes * 60
        # By rank 0's clock alone, which tells the others.
        timed = seconds > 0 and self._world.rank == 0
        self._due_at = time.monotonic() + seconds if timed else math.inf

    def _save(self, done: int) -> None:
        """Every rank has a part in it: the losses since the last row are each rank's own."""
        t, meter = self._training, self._meter
        self._set_due()
        losses = torch.zeros(self._world.size, dtype=torch.float64, device=self._world.device)
        losses[self._world.rank] = t.loss
        losses = sum_over_ranks(losses, self._world.group)
        if self._writer is None:
            return
        meter.deliver()
        state = {
            "row": meter.window,
            "losses": losses.tolist(),
            "seconds": meter.busy_seconds,
            "samples": meter.timed_samples,
            "figures": _finite(self._progress.figures),
            "best": list(self._progress.best) if self._progress.best else None,
            "config_hash": config_hash(self._recipe),
            "world_size": self._world.size,
            "threads": torch.get_num_threads(),
        }
        best = self._progress.best[1] if self._progress.best and self._recipe.checkpoint.best else None
        self._writer.submit(done, stage(tensors_of(t)), state, best)

    def _stop(self, number: int, done: int) -> None:
        written = self._writer is not None and self._writer.finish() == done
        kept = torch.tensor([float(written)])
        if self._world.control is not None or self._world.group is not None:
            dist.all_reduce(kept, group=self._world.control or self._world.group)
        name = signal.Signals(number)
        if not bool(kept) and not self._durable:
            raise Stopped(name, "no checkpoint could be written to go on from")
        raise Requeue(f"stopped by {name.name} after window {done}; the same command goes on from there")


def _copies(recipe: Recipe) -> int:
    """How often the weights lie in a run folder, at most: of each checkpoint weights, average and moments."""
    averages = 1 if recipe.ema.decay else 0
    moments = 1 if recipe.optim.name == "sgd" else 2
    kept = recipe.checkpoint.keep + recipe.checkpoint.best + 1
    return (1 + averages) + kept * (1 + averages + moments)


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


def _finite(figures: dict[str, float]) -> dict[str, float | None]:
    """JSON has no word for what isn't finite."""
    return {name: figure if math.isfinite(figure) else None for name, figure in figures.items()}


def _number(figure: Any) -> float:
    return math.nan if figure is None else float(figure)


def _set_status(folder: Path, status: str, reason: str) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    write_json(folder / "manifest.json", {**manifest, "status": status, "reason": reason})


def _evaluation_due(every: int, plan: Plan) -> Callable[[int], bool]:
    def due(windows: int) -> bool:
        if windows == plan.windows:
            return True
        return every > 0 and plan.epochs_done(windows) // every > plan.epochs_done(windows - 1) // every

    return due
