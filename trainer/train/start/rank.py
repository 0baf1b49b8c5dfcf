"""Course of a rank: from joining the other ranks to the final weights, or to a checkpoint."""

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import distributed as dist

from trainer.checkpoint.store import names_of
from trainer.config.recipe import Recipe
from trainer.config.section import config_hash
from trainer.distributed.parallel import (
    World,
    check_agreement,
    is_sharded,
    joined_world,
    least_over_ranks,
    open_store,
)
from trainer.distributed.turns import in_turns
from trainer.distributed.watchdog import Watchdog, watching
from trainer.errors import EXIT_DONE, EXIT_REQUEUE, BadInputError, LostPeerError, paths_explained
from trainer.host.affinity import limits_within, unpin_main_thread
from trainer.host.allocator import check_allocator
from trainer.host.here import paths_from_here
from trainer.host.limits import Limits, read_limits, threads_per_rank
from trainer.host.nvml import driver_version
from trainer.launch.signals import Stopped
from trainer.launch.worker import cpu_shares, current, interrupt_noted, note_signals
from trainer.observe.console import detail, say, warn
from trainer.observe.phases import PHASE_TIMER, enter_phase
from trainer.runs.folder import checkpoints_of
from trainer.runs.manifest import Manifest
from trainer.runs.report.write import leave_report
from trainer.tasks import Task
from trainer.train.anomaly import AnomalyDetector, Finding, read_anomalies
from trainer.train.components.checkpoint_choice import load_checkpoint, newest_checkpoint, resume_notes
from trainer.train.components.loading import choose_loading
from trainer.train.components.memory import memory_warning
from trainer.train.components.run import build
from trainer.train.components.task import (
    data_of,
    device_kind,
    methods_of,
    task_notes,
)
from trainer.train.hooks import HooksOfRank
from trainer.train.loop import train
from trainer.train.options import Mode
from trainer.train.outputs import Outputs, errors_explained, open_outputs
from trainer.train.request import PreparedRun, Request
from trainer.train.saving import Checkpoints
from trainer.train.start.prepare import prepared_in_turns
from trainer.train.start.undo import switches_kept
from trainer.train.starting_weights import begin_from
from trainer.train.state import Run
from trainer.train.summary import finish, gather_replaced, gather_weights


class RankEnd(NamedTuple):
    """End of a rank.

    Attributes:
        code: The exit code: 0 finished; 75 stopped by a signal or --stop-after, with a checkpoint to resume
            from.
        folder: The run folder.
    """

    code: int
    folder: Path


def train_rank(request: Request, task: Task | None = None, hooks: Sequence[Any] = ()) -> RankEnd:
    """Prepares a run with the other ranks, and trains as one of them.

    Args:
        request: What the start asks for, equal on all ranks.
        task: The task; None: the one that the recipe names.
        hooks: Hooks in addition to those of recipe and task, see `trainer.train.hooks`.

    Raises:
        BadInputError: If the recipe can't be trained here, or another process trains in the folder.
        RefusedElsewhereError: If another rank has found that it can't.
        DivergedError: If an anomaly ends the run, or its final loss or metric isn't finite.
        Stopped: If a signal stopped the run and there is no checkpoint.
    """
    worker = current()
    unpin_main_thread(cpu_shares())
    with contextlib.ExitStack() as stack:
        stack.enter_context(paths_from_here())
        stack.callback(note_signals)
        stack.enter_context(paths_explained())
        store = open_store(request.recipe.parallel.timeout_s)
        with in_turns(store) as turns, not_left_by(request.recipe.task):
            prepared, task, made = prepared_in_turns(request, turns, stack, task, hooks)
            if worker is not None:
                worker.write_to_a_log_of_its_own(prepared.folder)
        if prepared.ended is not None:
            line, code = prepared.ended
            if os.environ.get("RANK", "0") == "0":
                say(line)
            return RankEnd(code, prepared.folder)
        assert task is not None
        return RankEnd(_train_prepared(prepared, task, made, store), prepared.folder)


def _train_prepared(prepared: PreparedRun, task: Task, hooks: HooksOfRank, store: Any) -> int:
    recipe, folder = prepared.recipe, prepared.folder
    kind, data = device_kind(recipe), data_of(recipe, task, prepared.pretrained)
    detail(f"{len(task.train_data):,} samples to learn from, {len(task.evaluation_data):,} to measure on")
    if kind == "cuda":
        check_allocator(recipe.memory.allocator, os.environ, driver_version)
    with (
        joined_world(kind, recipe.parallel.timeout_s, store) as world,
        _saved_marked(folder),
        watching(world, recipe.parallel) as watchdog,
        _late_marked(),
        not_left_by(recipe.task),
    ):
        detail(f"{world.size} rank{'s' * (world.size > 1)} on {world.device}")
        return _attempt(prepared, task, hooks, data, world, watchdog)


@contextlib.contextmanager
def _saved_marked(folder: Path) -> Iterator[None]:
    """Marks the loss of a rank where this attempt has written a checkpoint."""
    place = checkpoints_of(folder)
    before = {*names_of(place)}
    try:
        yield
    except LostPeerError as error:
        with contextlib.suppress(OSError):
            error.saved = not before.issuperset(names_of(place))
        raise


@contextlib.contextmanager
def not_left_by(task: str) -> Iterator[None]:
    """Refuses a sys.exit() of a task's code, which would look like the end of a finished run."""
    try:
        yield
    except SystemExit as error:
        raise BadInputError(
            f"task={task}: its code ended the process by sys.exit({error.code!r}); raise an error there"
        ) from error


@contextlib.contextmanager
def _late_marked() -> Iterator[None]:
    """Marks bad input as late where steps were trained in this process before it was met."""
    try:
        yield
    except BadInputError as error:
        error.late = PHASE_TIMER.spent["update"] > 0
        raise


def _attempt(
    prepared: PreparedRun,
    task: Task,
    hooks: HooksOfRank,
    data: dict[str, str],
    world: World,
    watchdog: Watchdog,
) -> int:
    """Trains from the newest checkpoint; returns the exit code."""
    recipe, folder, stored = prepared.recipe, prepared.folder, prepared.stored
    with contextlib.ExitStack() as stack:
        switches_are_set = stack.enter_context(switches_kept())
        # Hosts may have different numbers of CPUs, but all ranks must use as many threads.
        threads, notes = choose_threads(recipe, stored, prepared.resume, world)
        torch.set_num_threads(least_over_ranks(threads, world))
        sharded = is_sharded(recipe.parallel, world)
        checkpoint, damaged = newest_checkpoint(folder, prepared.resume, world, stored, sharded)
        begin = checkpoint.step if checkpoint else 0
        anomalies = [one for one in read_anomalies(folder) if one["step"] <= begin]  # later ones come again
        begun = (stored.begun_from if stored else prepared.begun_from) if checkpoint is None else None
        fresh = checkpoint is None and begun is None
        where = f"{begin} of {begun.hash}" if begun else str(begin)
        check_agreement(f"{config_hash(recipe)} {data} {methods_of(task)} from {where}", world)
        losses = ", ".join(getattr(task, "losses", ()))  # summed over the ranks in this order
        check_agreement(losses, world, f"orders of the losses ({losses})", "name them in a tuple, not a set")

        run, loading = _build(prepared, task, world, fresh)
        switches_are_set()
        stack.callback(run.close)
        detail(f"model, optimizer and loaders; {run.gradient_accumulation_steps} micro-batches a step")
        load_checkpoint(run, checkpoint, prepared.stop_after, stored)
        parallel = recipe.parallel.model_dump()
        resumed = resume_notes(stored, damaged, begin, world, run.steps, parallel)
        notes += [*loading, *run.notes, *resumed, *run.share.plan.notes, *task_notes(stored, task)]
        if begun is not None:
            notes += begin_from(run, folder, begun)
        note_signals()
        out = open_outputs(stack, prepared, run, stored, data, notes, anomalies, hooks)
        detector = None
        if run.recent is not None:
            group, history = run.reduction.loss_group, run.state.history
            detector = AnomalyDetector(recipe.anomaly, run.recent, group, begin, history, len(anomalies))
        detail(f"the loop begins with step {begin + 1}")
        watchdog.start(begin + recipe.compile.warm_up if run.compiled else 0)
        with errors_explained(run, folder), interrupt_noted():
            ending = train(run, out, detector, stop_after=prepared.stop_after)

        if ending.finding is not None:
            _end_by_anomaly(ending.finding, prepared, run, out)
        if ending.how != "finished":
            out.leave(
                "stopped",
                _how_to_resume(ending.signal, run.state.step, out.checkpoints, prepared.command),
                run.state.step,
            )
            return EXIT_REQUEUE
        out.checkpoints.close()
        gathered = gather_weights(run)
        run.state.metrics |= gather_replaced(run)
        if out.manifest is not None and out.progress_bar is not None:
            if out.profile is not None:
                out.progress_bar.say(out.profile.close())
            finish(folder, run, out.manifest, out.logger, out.progress_bar, out.advisor, gathered)
    return EXIT_DONE


def _build(prepared: PreparedRun, task: Task, world: World, fresh: bool) -> tuple[Run, list[str]]:
    """Builds the run, and returns it with notes on its loader; warns if memory may not suffice."""
    recipe = prepared.recipe
    loading = choose_loading(recipe, task, _limits(), world.local_size)
    setting = loading.setting
    run = build(recipe, task, world, setting.workers, prepared.folder, setting.prefetch, fresh)
    if line := memory_warning(recipe, task, run.state.model, world, loading.bytes):
        warn(line)
    return run, [loading.line] if loading.line else []


def _end_by_anomaly(finding: Finding, prepared: PreparedRun, run: Run, out: Outputs) -> NoReturn:
    """Writes the anomaly, checkpoints and report, before any rank leaves; collective.

    Raises:
        DivergedError: The run's end.
    """
    enter_phase("checkpoint")
    end = out.anomalies.ends(finding, prepared.recipe.anomaly)
    out.checkpoints.close()
    if out.progress_bar is not None:
        out.progress_bar.close()
    if out.manifest is not None:
        out.leave("diverged", str(end), run.state.step)
        leave_report(prepared.folder)
    if run.world.group is not None:  # the ranks wait for each other until all is written
        dist.barrier(run.world.control or run.world.group)
    raise end


def _how_to_resume(number: int, done: int, checkpoints: Checkpoints, command: str) -> str:
    """Returns a line on why the run stopped and how to resume it from its newest checkpoint; collective.

    Args:
        number: Number of the signal that stopped it; 0: --stop-after.
        done: Steps done.
        checkpoints: The checkpoints of the attempt.
        command: The command as it was typed.

    Raises:
        BadInputError: If no checkpoint could be written for --stop-after.
        Stopped: If no checkpoint could be written after a signal.
    """
    enter_phase("checkpoint")
    step = checkpoints.newest()
    where = "from there" if step == done else f"after step {step}, its newest checkpoint"
    if not number:
        if step < 0:
            raise BadInputError(f"--stop-after {done}: no checkpoint could be written; make room on the disk")
        return f"stopped after step {done} as asked; without --stop-after it resumes {where}"
    name = signal.Signals(number)
    if step < 0:
        raise Stopped(name, "no checkpoint could be written to resume from")
    if current() is None:  # fit
        return f"stopped by Ctrl-C after step {done}; fit with the same settings and its out resumes {where}"
    more = words_to_resume(command)
    return f"stopped by {name.name} after step {done}; the same command resumes {where}{more}"


def words_to_resume(typed: str) -> str:
    """Returns what a command needs to resume its run, in brackets: another flag, or one less; or ""."""
    words = typed.replace("=", " ").split()
    mode = words[words.index("--resume") + 1] if "--resume" in words else "auto"
    if mode == "never":
        return " (without --resume never)"
    return "" if "--out" in words or mode not in ("auto", "force") else " (with --resume newest)"


def choose_threads(
    recipe: Recipe, stored: Manifest | None, mode: Mode, world: World
) -> tuple[int, list[str]]:
    """Chooses intra-op threads, which are part of the arithmetic on a CPU: a resumed run keeps its number.

    Returns:
        The number, and notes for the user.
    """
    threads = recipe.parallel.threads
    if threads != "auto":
        return threads, []
    if stored is not None and mode != "force":
        return stored.threads, []
    if recipe.parallel.reduction == "tree" and world.device.type == "cpu":
        # A rank's CPUs, and so its threads and the bits, would depend on the number of ranks.
        return 1, [
            "one thread per rank, so that the bits don't depend on the number of ranks "
            "(parallel.reduction=tree); more by parallel.threads, which is then part of the arithmetic"
        ]
    return threads_per_rank(_limits(), world.local_size), []


def _limits() -> Limits:
    """Returns the limits of this host's ranks, within the CPUs that they are bound to."""
    return limits_within(read_limits(), cpu_shares())
