"""One attempt at a run: from joining the other ranks to the summary, or to a checkpoint to go on from."""

import contextlib
import math
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from trainer.checkpoint import FOLDER
from trainer.checkpoint.background import BackgroundWriter
from trainer.checkpoint.folder import Checkpoint, Unreadable
from trainer.checkpoint.store import newest_good, remove_leftovers, set_foreign_aside
from trainer.config.recipe import Recipe
from trainer.config.section import config_hash
from trainer.data.fit import Loading, bytes_needed
from trainer.distributed.parallel import World, check_agreement, joined_world, least_over_ranks
from trainer.distributed.watchdog import Watchdog, watching
from trainer.errors import EXIT_DONE, EXIT_REQUEUE, BadInputError
from trainer.host.affinity import binding_note, shares_of, unpin_main_thread, within
from trainer.host.limits import Limits, read_limits, threads_per_rank
from trainer.host.memory import read_room
from trainer.launch.signals import requested
from trainer.observe.checksums import Checksums
from trainer.observe.console import ProgressBar, warn
from trainer.observe.log import MetricLogger, Sink
from trainer.observe.phases import PHASE_TIMER, enter_phase
from trainer.observe.profile import Kind
from trainer.tasks import Task
from trainer.train.allocator import set_up_allocator
from trainer.train.anomalies import AnomalyLog, anomalies_before, left_out, read_anomalies, restore_anomalies
from trainer.train.anomaly import AnomalyDetector
from trainer.train.between_steps import Anomaly, BetweenSteps, Requeue
from trainer.train.explain import explain, memory_explained, profiled
from trainer.train.loading import forked, settle, sizes
from trainer.train.manifest import make_manifest
from trainer.train.prepare import memory_to_come, too_much
from trainer.train.progress import Progress, from_state
from trainer.train.report.write import leave_report
from trainer.train.resume import Mode, Stored, check_resumable, ended, read_stored
from trainer.train.run import Parts, assemble, check_request, data_of, device_kind, make_plan, make_task
from trainer.train.run_folder import check_space, open_folder, set_status
from trainer.train.run_lock import lock
from trainer.train.state import load_tensors
from trainer.train.step import Training, take_metrics
from trainer.train.summary import finish, introduce

_ROLLED_BACK = -1
_SHOWN = 4


def train_rank(
    recipe: Recipe,
    recipe_name: str,
    folder: Path,
    mode: Mode = "auto",
    stop_after: int | None = None,
    profile: Kind | None = None,
    task: Task | None = None,
) -> int:
    """What each rank does.

    Args:
        recipe: The validated configuration.
        recipe_name: For the manifest.
        folder: The run folder; rank 0 writes to it. If it holds a run, that is gone on with.
        mode: Whether a changed configuration may go on.
        stop_after: The step after which to stop with a checkpoint, or None.
        profile: Whether to look at some steps, and how.
        task: What is learned; None: what the recipe names.

    Returns:
        0 done, 75 stopped, by a signal or as asked for, with a checkpoint to go on from.

    Raises:
        BadInputError: If the recipe can't be trained here, or another process trains in the folder.
        DivergedError: If its numbers went bad.
        Stopped: If a signal stopped it and there is no checkpoint.
    """
    unpin_main_thread()
    if _is_first():
        lock(folder)  # until this process ends
    # Before the ranks meet, and so before rank 0 writes the manifest anew.
    stored = read_stored(folder)
    kind, task = device_kind(recipe), task or make_task(recipe)
    data = data_of(task)
    if (
        stored is not None
        and (code := _is_through(folder, stored, recipe, task, kind, data, mode)) is not None
    ):
        return code
    request = _Request(recipe, recipe_name, folder, mode, stop_after, task, data, profile)
    if kind == "cuda":
        set_up_allocator(recipe.memory.allocator, os.environ)
    with joined_world(kind, recipe.parallel.timeout_s) as world, watching(world, recipe.parallel) as watchdog:
        while True:
            code = _train(request, world, stored, watchdog)
            if code != _ROLLED_BACK:
                return code
            PHASE_TIMER.step = 0  # it may take as long as the first time
            enter_phase("start")
            stored = read_stored(folder)


class _Request(NamedTuple):
    """What `train_rank` was asked for, and the data that it is about."""

    recipe: Recipe
    name: str
    folder: Path
    mode: Mode
    stop_after: int | None
    task: Task
    data: dict[str, str]
    profile: Kind | None


def _train(request: _Request, world: World, stored: Stored | None, watchdog: Watchdog) -> int:
    """Trains from the newest checkpoint to the end, a stop, or a rollback; returns which."""
    recipe, recipe_name, folder, mode, stop_after, task, data, kind = request
    with contextlib.ExitStack() as stack:
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        # Hosts may have unlike numbers of CPUs, and the sums of all ranks are to be alike.
        threads, of_threads = _threads(recipe, stored, mode, local_size, world.device)
        threads = least_over_ranks(threads, world)
        torch.set_num_threads(threads)
        check_request(recipe, task, world.size)
        found, skipped = _newest(folder, mode, world, stored)
        at = found.step if found else 0
        anomalies = anomalies_before(read_anomalies(folder), at, make_plan(recipe, task))
        refused = left_out(anomalies)
        check_agreement(f"{config_hash(recipe)} {data} from {at} without {sorted(refused)}", world)
        parts, loads = _assemble(stack, recipe, task, world, local_size, folder)
        t = parts.training
        progress = _go_on(t, found, world, stop_after, stored)
        notes = [
            *of_threads,
            *loads,
            *parts.notes,
            *_how_it_goes_on(stored, skipped, progress, world, refused),
        ]
        desk = None
        if world.rank == 0:
            restore_anomalies(folder, anomalies)
            manifest = make_manifest(
                recipe,
                recipe_name,
                world,
                t.share.plan,
                threads,
                task.describe(),
                data,
                notes,
                progress.step,
                stored,
            )
            manifest["anomalies"] = len(anomalies)
            desk = _open_desk(stack, folder, recipe, manifest, parts, world, progress.step, stored)
        sinks, checksums = (desk.sinks, desk.checksums) if desk else ([], None)
        logger = MetricLogger(t.share.plan, world.device, sinks, lambda: take_metrics(t), checksums)
        advisor = explain(stack, recipe, parts, world, local_size, logger)
        logger.go_on(progress.row, progress.seconds, progress.samples)
        log = AnomalyLog(folder if desk else None, t.share.plan)
        detector = _make_detector(recipe, t, at, progress.history, refused, len(anomalies), log)
        writer, progress_bar = (desk.writer, desk.progress_bar) if desk else (None, None)
        profile = profiled(stack, kind if desk else None, folder, recipe, parts, world.device)
        between = BetweenSteps(
            recipe,
            world,
            parts,
            logger,
            progress,
            writer,
            progress_bar,
            data,
            stop_after,
            detector,
            refused,
            profile,
        )
        between.run_id = desk.manifest["run_id"] if desk else ""
        watchdog.start(progress.step + recipe.compile.warm_up if parts.compiled else 0)
        try:
            try:
                with memory_explained(recipe, parts, world, folder if desk else None):
                    between.train()
            except Anomaly as anomaly:
                _after_anomaly(anomaly, between, log, recipe, world, desk, folder)
                return _ROLLED_BACK
        except Requeue as requeue:
            if desk:
                desk.progress_bar.close()
                desk.progress_bar.say(f"  {requeue}")
                set_status(folder, desk.manifest, "stopped", str(requeue))
            return EXIT_REQUEUE
        if desk:
            desk.writer.finish()
            if profile is not None:
                desk.progress_bar.say(profile.close())
            finish(
                folder, desk.manifest, t, logger, task.metric, progress.metrics, desk.progress_bar, advisor
            )
    return EXIT_DONE


def _assemble(
    stack: contextlib.ExitStack, recipe: Recipe, task: Task, world: World, local_size: int, folder: Path
) -> tuple[Parts, list[str]]:
    """The run's parts, of which the stack closes the loaders; and a line on how it loads, if there is any."""
    settled, workers, loads = settle(recipe, task, _limits(), local_size, os.environ)
    parts = assemble(settled, task, world, workers, folder)
    stack.callback(parts.loader.close)
    stack.callback(parts.evaluation_loader.close)
    if world.local_rank == 0:
        model = parts.training.model
        needs = memory_to_come(recipe, task, model, world)
        if loads:
            setting = Loading(workers, int(settled.data.prefetch))
            needs["loading"] = bytes_needed(setting, sizes(recipe, task), forked(recipe.data))
        if line := too_much(read_room(), local_size, needs):
            warn(line)
    return parts, loads


def _make_detector(
    recipe: Recipe,
    t: Training,
    at: int,
    history: list[float],
    refused: Collection[int],
    anomalies: int,
    log: AnomalyLog,
) -> AnomalyDetector | None:
    if t.ring is None:
        return None
    group = None if t.tree is not None else t.group
    return AnomalyDetector(recipe.anomaly, t.ring, group, at, history, refused, anomalies, log.skipped)


def _after_anomaly(
    anomaly: Anomaly,
    between: BetweenSteps,
    log: AnomalyLog,
    recipe: Recipe,
    world: World,
    desk: "_Desk | None",
    folder: Path,
) -> None:
    """Writes down what happened, all of it, before any rank leaves; returns if the run is to be rolled back.

    Raises:
        DivergedError: If it is to stop.
        Requeue: If it is to be rolled back, and a signal asks for a stop: the next attempt does that.
        Stopped: The same, but there is no checkpoint.
    """
    enter_phase("checkpoint")
    end = log.ends(anomaly.finding, recipe.anomaly)
    if desk:
        desk.writer.finish()
        desk.progress_bar.close()
        if end:
            set_status(folder, desk.manifest, "diverged", str(end))
            leave_report(folder)
    # Where the ranks wait for each other until all is written.
    signals = torch.tensor([int(requested() or 0)])
    if world.group is not None:
        dist.all_reduce(signals, dist.ReduceOp.MAX, group=world.control or world.group)
    if end:
        raise end
    if int(signals):
        between.stop(int(signals), anomaly.done)


class _Desk(NamedTuple):
    """What rank 0 writes with."""

    manifest: dict[str, Any]
    sinks: list[Sink]
    checksums: Checksums | None
    progress_bar: ProgressBar
    writer: BackgroundWriter


def _open_desk(
    stack: contextlib.ExitStack,
    folder: Path,
    recipe: Recipe,
    manifest: dict[str, Any],
    parts: Parts,
    world: World,
    step: int,
    stored: Stored | None,
) -> _Desk:
    """Opens the run folder for a run that goes on after so many steps; the stack closes it."""
    check_space(folder, parts.training.model, copies=_copies(recipe))
    if stored is not None:  # all ranks have read theirs: they agreed
        try:
            aside = set_foreign_aside(folder / FOLDER, stored.foreign)
        except OSError as error:
            raise BadInputError(
                f"{folder / FOLDER}: another run's checkpoint can't be renamed ({error.strerror}); mend that"
            ) from error
        if aside:
            warn(f"{folder / FOLDER}: checkpoints of other runs were renamed: {', '.join(aside)}")
    sinks, checksums = stack.enter_context(open_folder(folder, recipe, manifest, step, parts.training.model))
    progress_bar = introduce(manifest, parts, world, folder)
    stack.callback(progress_bar.close)
    sinks.append(progress_bar)
    if parts.training.nonfinite is not None:
        sinks.append(parts.training.nonfinite.explain)
    writer = BackgroundWriter(folder / FOLDER, recipe.checkpoint.keep, warn, step or None)
    stack.callback(writer.abandon)
    return _Desk(manifest, sinks, checksums, progress_bar, writer)


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _is_through(
    folder: Path, stored: Stored, recipe: Recipe, task: Task, kind: str, data: dict[str, str], mode: Mode
) -> int | None:
    """The exit code if the folder's run has come to its end, which is told; else it may be gone on with."""
    check_resumable(folder, stored, recipe.model_dump(mode="json"), kind, data, mode)
    over = ended(folder, stored, mode, make_plan(recipe, task).steps)
    if over and _is_first():
        print(over[0], flush=True)
    return over[1] if over else None


def _copies(recipe: Recipe) -> int:
    """How often the weights lie in a run folder, at most: of each checkpoint weights, average and moments."""
    averages = 1 if recipe.ema.decay else 0
    moments = 1 if recipe.optim.name == "sgd" else 2
    kept = recipe.checkpoint.keep + recipe.checkpoint.best + 1
    return (1 + averages) + kept * (1 + averages + moments)


def _newest(
    folder: Path, mode: Mode, world: World, stored: Stored | None = None
) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint to go on from, and why newer ones were left out."""
    try:
        if world.rank == 0:
            remove_leftovers(folder / FOLDER)
        found, skipped = newest_good(folder / FOLDER, stored.foreign if stored else None)
    except OSError as error:
        raise BadInputError(
            f"{folder / FOLDER} can't be used ({error.strerror}); mend that, or give another --out"
        ) from error
    except Unreadable as error:
        raise BadInputError(
            f"{folder / FOLDER}: {error}; mend that, or move it away to go on from the one before"
        ) from error
    if skipped and found is None and mode != "force":
        more = f"; and {len(skipped) - _SHOWN} more" if len(skipped) > _SHOWN else ""
        raise BadInputError(
            f"{folder}: none of its checkpoints can be trusted ({'; '.join(skipped[:_SHOWN])}{more}); "
            "bring one back, give another --out, or begin again by --resume force"
        )
    if stored is not None and stored.status == "finished" and found is None:
        raise BadInputError(
            f"{folder}: the finished run has no checkpoint to be extended from; give another --out"
        )
    return found, skipped


def _threads(
    recipe: Recipe, stored: Stored | None, mode: Mode, local_size: int, device: torch.device
) -> tuple[int, list[str]]:
    """Intra-op threads: part of the arithmetic on a CPU, so those that the run was begun with; and a note."""
    threads = recipe.parallel.threads
    if threads != "auto":
        return threads, []
    if stored is not None and mode != "force":
        return stored.threads, []
    if recipe.parallel.reduction == "tree" and device.type == "cpu":
        # A rank's share would depend on the number of ranks, and so would the bits.
        return 1, [
            "one thread per rank, so that the bits don't depend on the number of ranks "
            "(parallel.reduction=tree); more by parallel.threads, which is then part of the arithmetic"
        ]
    return threads_per_rank(_limits(), local_size), []


def _limits() -> Limits:
    """What the ranks of this host may use together, bound as they are."""
    return within(read_limits(), shares_of(os.environ))


def _go_on(
    t: Training,
    found: Checkpoint | None,
    world: World,
    stop_after: int | None = None,
    stored: Stored | None = None,
) -> Progress:
    """Puts a checkpoint into the run."""
    if found is not None and stop_after is not None and found.step >= stop_after:
        raise BadInputError(
            f"--stop-after {stop_after}: {found.path} is of step {found.step} already; give a later one"
        )
    if found is None:
        return Progress()
    # At its own end a run lacks only its weights: what ended it there is what is repeated.
    at_its_end = stored is not None and found.step == t.share.plan.steps == stored.steps
    if found.step >= t.share.plan.steps and not (at_its_end and found.state.get("metrics")):
        raise BadInputError(
            f"{found.path} is of step {found.step}, and this configuration ends at {t.share.plan.steps}: "
            "nothing is left to train; raise epochs or max_steps, or give another --out"
        )
    try:
        progress = from_state(found.step, found.state)
        load_tensors(t, found.step, found.tensors)
    except (KeyError, ValueError) as error:
        raise BadInputError(
            f"{found.path}: isn't a checkpoint of this run ({error}); give another --out, or remove it"
        ) from error
    # Another world has other parts of the sum; their total is the same. With a tree each rank has it.
    same = len(progress.losses) == world.size and t.tree is None
    total = math.fsum(progress.losses) * (world.rank == 0 or t.tree is not None)
    t.loss.fill_(progress.losses[world.rank] if same else total)
    return progress


def _how_it_goes_on(
    stored: Stored | None, skipped: list[str], progress: Progress, world: World, refused: Collection[int]
) -> list[str]:
    notes = [note] if (note := binding_note(os.environ)) else []
    notes += [f"checkpoint left out: {line}" for line in skipped]
    if refused:
        notes.append(f"without step {', '.join(str(step + 1) for step in sorted(refused))}")
    if stored is None:
        return notes
    if not progress.step:
        return [*notes, "begins again: the earlier attempt left no checkpoint"]
    notes.append(f"goes on after step {progress.step}")
    if stored.status == "finished":
        notes[-1] += f": the run ended at step {stored.steps} and is extended"
    if stored.world_size != world.size:
        tree = stored.config.get("parallel", {}).get("reduction") == "tree"
        sums = "and the same bits (parallel.reduction=tree)" if tree else "but sums in another order"
        notes.append(
            f"on {world.size} rank{'s' * (world.size > 1)} instead of {stored.world_size}: the same "
            f"samples in the same steps, {sums}"
        )
    return notes
