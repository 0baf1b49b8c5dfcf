"""Output of a rank while it trains: metrics records on every rank, on rank 0 also files and the console."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.checkpoint.background import BackgroundWriter
from trainer.checkpoint.store import set_foreign_aside
from trainer.config.data import is_url
from trainer.data.dataset import LENGTH, NUM_ITEMS, Dataset
from trainer.data.formats.images import ImageDataset
from trainer.data.sampling.plan import Plan
from trainer.distributed.parallel import gather_rows
from trainer.errors import OutOfMemory
from trainer.host.latest import link_latest
from trainer.host.limits import read_limits
from trainer.models.compiling import failed_to_compile
from trainer.observe.advice import Advisor, host_clock
from trainer.observe.checksums import Checksums
from trainer.observe.console import ProgressBar, warn
from trainer.observe.diagnosis import Facts, fewer_checkpoints, fewer_evaluations
from trainer.observe.flops import peak_flops
from trainer.observe.log import MetricLogger, Row, Sink, Sources
from trainer.observe.machine import Machine
from trainer.observe.memory import memory_source
from trainer.observe.oom import explain_oom, held_by, is_out_of_memory
from trainer.observe.profile import Profile
from trainer.observe.progress import Progress, served
from trainer.runs.folder import checkpoints_of
from trainer.runs.manifest import Manifest, update_manifest
from trainer.runs.tracking.feed import tracked
from trainer.train.anomaly import AnomalyLog, write_anomalies
from trainer.train.components.memory import (
    check_space,
    could_be_sharded,
    describe_model,
    show_model,
    top_parts,
)
from trainer.train.components.operations import count_operations
from trainer.train.components.updates import brings_optimizer
from trainer.train.evaluate import shown_to_hooks
from trainer.train.hooks import (
    HookRows,
    HooksOfRank,
    checkpoint_hook,
    hook_sink,
    load_sinks,
)
from trainer.train.provenance import make_manifest
from trainer.train.recording import open_recording, other_ranks_checksums, writable
from trainer.train.request import PreparedRun
from trainer.train.saving import Checkpoints
from trainer.train.state import Run
from trainer.train.step import take_metrics
from trainer.train.summary import introduce
from trainer.version import __version__

_COUNTED = 1000  # steps whose samples are looked up at once
_PAUSE_S = 0.25  # metrics records that come faster have their explanation only once in so many seconds


@dataclass(frozen=True)
class Outputs:
    """Receivers of all that a run logs and writes.

    Attributes:
        logger: Logs the metrics records.
        checkpoints: Saves the state.
        anomalies: Writes anomalies to a file.
        each_step: Functions that are called after each step with the number of steps done.
        manifest: The run's manifest, on rank 0; None elsewhere.
        progress_bar: The console, on rank 0; None elsewhere.
        advisor: Names the bottleneck, on rank 0; None elsewhere.
        profile: Profiles some steps, on rank 0; None without --profile.
        asked: Names of hooks that ask to finish.
        for_hooks: Returns the context in which hooks get an evaluation's metrics, on all ranks alike.
    """

    logger: MetricLogger
    checkpoints: Checkpoints
    anomalies: AnomalyLog
    each_step: tuple[Callable[[int], None], ...] = ()
    manifest: Manifest | None = None
    progress_bar: ProgressBar | None = None
    advisor: Advisor | None = None
    profile: Profile | None = None
    asked: list[str] = field(default_factory=list)
    for_hooks: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext

    def leave(self, status: str, line: str, step: int) -> None:
        """Closes an attempt that stops early: its status and reason go to console and manifest, on rank 0."""
        if self.progress_bar is not None and self.manifest is not None and self.anomalies.folder is not None:
            self.progress_bar.close()
            if status == "stopped":
                self.progress_bar.say(f"  {line}")
            with contextlib.suppress(OSError):  # such as a full disk: it must not hide the reason
                update_manifest(
                    self.anomalies.folder, self.manifest, status=status, reason=line, steps_done=step
                )


def bare_outputs(
    stack: contextlib.ExitStack, run: Run, sinks: Sequence[Sink] = (), checksums: Checksums | None = None
) -> Outputs:
    """Metrics records with their explanation, without a run folder: for measuring the loop itself."""
    sources = metric_sources(stack, run)
    logger = _make_logger(run, list(sinks), checksums, sources)
    _add_advisor(run, logger, sources, profiled=False)
    return Outputs(logger, Checkpoints(run), AnomalyLog(None, run.plan))


def open_outputs(
    stack: contextlib.ExitStack,
    prepared: PreparedRun,
    run: Run,
    stored: Manifest | None,
    data: Mapping[str, str],
    notes: Sequence[str],
    anomalies: list[dict[str, Any]],
    given: HooksOfRank,
) -> Outputs:
    """Opens the outputs of this rank; the stack closes them.

    Args:
        stack: Closed when the attempt is over.
        prepared: What this run was built from.
        run: The run, with its checkpoint loaded.
        stored: The manifest of earlier attempts, or None.
        data: Fingerprints of the data, from `data_of`.
        notes: Lines for the manifest and the console.
        anomalies: Anomalies of earlier attempts that still hold.
        given: Hooks of this rank.

    Raises:
        BadInputError: If the run folder can't be written, or lacks room.
    """
    folder, config = prepared.folder, run.recipe.hooks
    hooks = given.made
    asked, for_hooks = (
        list[str](),
        partial(shown_to_hooks, run) if given.ask else contextlib.nullcontext,
    )
    if run.world.rank:
        sinks = [hook_sink(hooks, config, model=run.state.model, asked=asked)] if hooks else []
        checksums = other_ranks_checksums(run)
        logger = _make_logger(run, sinks, checksums, metric_sources(stack, run))
        row_writer = None
        if run.state.rows is not None and run.state.rows.first:
            row_writer = BackgroundWriter(checkpoints_of(folder), run.recipe.checkpoint.keep, warn)
            stack.callback(row_writer.abandon)
        return Outputs(
            logger,
            Checkpoints(run, row_writer),
            AnomalyLog(None, run.plan),
            asked=asked,
            for_hooks=for_hooks,
        )
    manifest = make_manifest(
        run, prepared.name, prepared.command, data, notes, stored, prepared.begun_from, prepared.pretrained
    )
    manifest.anomalies = len(anomalies)
    sources = metric_sources(stack, run)
    if sources.count is not None:
        shown = top_parts(run.state.model)
        own = brings_optimizer(run.task)
        ranks = run.world.size if could_be_sharded(run.recipe, run.task, run.world.size) else 0
        manifest.model = describe_model(run.recipe, run.state.model, shown, sources.count, own, ranks)
    check_space(folder, run.recipe, run.state.model, brings_optimizer(run.task))
    with writable(folder):
        # All ranks have read their checkpoint by now: they have agreed on it.
        place = checkpoints_of(folder)
        if stored is not None and (aside := set_foreign_aside(place, stored.foreign)):
            warn(f"{place}: checkpoints of other runs were renamed: {', '.join(aside)}")
        write_anomalies(folder, anomalies)
        if stored is None:
            link_latest(folder)
    sinks, checksums = stack.enter_context(open_recording(folder, run, manifest))
    progress_bar = introduce(manifest, run, folder)
    if run.state.step == 0 and manifest.model is not None:
        show_model(manifest.model, progress_bar, run.world.device)
    stack.callback(progress_bar.close)
    sinks.append(progress_bar)
    if run.nonfinite is not None:
        sinks.append(run.nonfinite.name_first)
    sinks += [_watch_for_no_gradient(), *load_sinks(run.recipe.log, config)]
    sinks += stack.enter_context(tracked(folder, run.recipe, run.state.step, manifest, progress_bar.say))
    writer = BackgroundWriter(place, run.recipe.checkpoint.keep, warn, run.state.step or None)
    stack.callback(writer.abandon)
    if run.recipe.log.metrics_port:
        sinks.append(stack.enter_context(_served(folder, run, manifest, writer)))
    logger = _make_logger(run, sinks, checksums, sources)
    if hooks:
        sinks.append(hook_sink(hooks, config, HookRows(folder, logger), run.state.model, asked))
    advisor = _add_advisor(run, logger, sources, profiled=prepared.profile is not None)
    profile = _open_profile(stack, prepared, run)
    written = checkpoint_hook(hooks, config, asked)
    checkpoints = Checkpoints(run, writer, manifest.run_id, data, written)
    return Outputs(
        logger,
        checkpoints,
        AnomalyLog(folder, run.plan, getattr(run.task, "mean", False)),
        each_step=(
            *([profile.step_done] if profile else []),
            progress_bar.step_done,
            *([_compiled(run, progress_bar)] if run.compiled else []),
            *([checkpoints.look] if written else []),
        ),
        manifest=manifest,
        progress_bar=progress_bar,
        advisor=advisor,
        profile=profile,
        asked=asked,
        for_hooks=for_hooks,
    )


def _watch_for_no_gradient() -> Sink:
    """Makes a sink that warns once of a step whose gradient is 0 although its loss isn't."""
    warned = False

    def watch(row: Row) -> None:
        nonlocal warned
        if warned or row["kind"] != "train" or row.get("grad_norm") != 0 or not row.get("loss"):
            return
        warned = True
        warn(
            f"the gradient of step {row['step']} is 0 although its loss is {row['loss']:.4g}: nothing is "
            "learned from it; look for detach() and no_grad() between the parameters and the loss, and try "
            "compile.mode=none if the model is compiled"
        )

    return watch


@contextlib.contextmanager
def _served(folder: Path, run: Run, manifest: Manifest, writer: BackgroundWriter) -> Iterator[Progress]:
    """Serves the run's progress to Prometheus; yields the sink that updates it."""
    begun = run.state.step
    about = {
        "run": folder.name,
        "recipe": Path(manifest.recipe).stem,
        "run_id": manifest.run_id,
        "config_hash": manifest.config_hash,
        "commit": manifest.commit or "",
        "version": __version__,
    }
    progress = Progress(
        about, run.steps, begun, lambda: (begun or None) if writer.written is None else writer.written
    )
    with served(run.recipe.log, progress):
        yield progress


def _make_logger(run: Run, sinks: list[Sink], checksums: Checksums | None, sources: Sources) -> MetricLogger:
    take, logged = partial(take_metrics, run), run.state.logged
    refuse = None if run.still is None else run.still.refuse
    return MetricLogger(run.plan, run.world.device, sinks, take, checksums, logged, sources, refuse)


def _compiled(run: Run, progress_bar: ProgressBar) -> Callable[[int], None]:
    began, last = time.monotonic(), run.state.step + run.recipe.compile.warm_up

    def report(done: int) -> None:
        if done == last:
            progress_bar.say(f"  compiled in {time.monotonic() - began:.0f} s")

    return report


def token_counter(plan: Plan, dataset: Dataset) -> Callable[[range], int] | None:
    """Returns a function that counts the tokens of some steps, without padding; None where there are none."""
    if dataset.num_items == 1:
        return None
    if NUM_ITEMS not in dataset.fields:
        return lambda steps: (
            dataset.num_items * (plan.samples_seen(steps.stop) - plan.samples_seen(steps.start))
        )
    if dataset.arrays is None:
        return None
    lengths = dataset.arrays.get(LENGTH, dataset.arrays[NUM_ITEMS])

    def count(steps: range) -> int:
        total, each = 0, plan.micro_batches
        for first in range(steps.start, steps.stop, _COUNTED):
            last = min(first + _COUNTED, steps.stop)
            read = plan.read(np.arange(first * each, last * each))
            total += int((lengths[read.sample] * (read.weight > 0)).sum())
        return total

    return count


def metric_sources(stack: contextlib.ExitStack, run: Run) -> Sources:
    """Sources of this rank's metrics other than the step's own: phases, machine, memory, FLOPs.

    Args:
        stack: Closes them.
        run: The run.
    """
    task, device, world = run.task, run.world.device, run.world
    gather = partial(gather_rows, world) if world.group is not None else None
    if world.rank:
        return Sources(gather=gather, pause_s=_PAUSE_S)
    machine = Machine(device.type == "cuda", world.local_size)
    stack.callback(machine.close)
    peak = None
    if device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(device), run.recipe.precision.mode)
    return Sources(
        token_counter(run.plan, task.train_data),
        (stack.enter_context(host_clock()), run.loader.take_work, machine.take, memory_source(device)),
        gather,
        count_operations(
            task,
            run.state.model,
            run.recipe.data.micro_batch_size,
            device,
            top_parts(run.state.model),
        ),
        None if peak is None else peak * world.size,
        _PAUSE_S,
    )


def _add_advisor(run: Run, logger: MetricLogger, sources: Sources, profiled: bool) -> Advisor:
    """Adds the sink that judges the metrics records to the logger, and returns it."""
    recipe, world, limits = run.recipe, run.world, read_limits()
    images = run.task.train_data
    facts = Facts(
        on_gpu=world.device.type == "cuda",
        ranks=world.size,
        local_ranks=world.local_size,
        threads=torch.get_num_threads(),
        cpus=limits.cpus,
        step_samples=recipe.data.global_batch_size,
        micro_batch_size=recipe.data.micro_batch_size,
        remote=is_url(str(recipe.data.path)),
        decodes=isinstance(images, ImageDataset) and not images.records.raw,
        profiled=profiled,
        fewer_checkpoints=fewer_checkpoints(recipe.checkpoint, recipe.evaluation),
        fewer_evaluations=fewer_evaluations(recipe.evaluation),
    )
    price, logged = recipe.log.price_per_hour, run.state.logged
    advisor = Advisor(facts, sources.count, logger.emit, price, logged)
    logger.sinks.append(advisor)
    return advisor


def _open_profile(stack: contextlib.ExitStack, prepared: PreparedRun, run: Run) -> Profile | None:
    if prepared.profile is None:
        return None
    profile = Profile(
        prepared.folder,
        run.state.model,
        run.world.device,
        kind=prepared.profile,
        skip=run.recipe.compile.warm_up + 4,
        modules=not run.compiled,
    )
    stack.callback(profile.close)
    return profile


@contextlib.contextmanager
def errors_explained(run: Run, folder: Path | None) -> Iterator[None]:
    """Replaces an out-of-memory error by one that lists what holds the memory; tells of a failed compilation.

    Raises:
        OutOfMemory: In place of torch's error, or Python's.
    """
    try:
        yield
    except Exception as error:
        if not (isinstance(error, RuntimeError | MemoryError | OSError) and is_out_of_memory(error)):
            if failed_to_compile(error):
                warn("torch's compiler failed, as said below: compile.mode=none trains without it")
            raise
        state, recipe = run.state, run.recipe
        average = state.average.tensors.values() if state.average is not None else ()
        text = explain_oom(
            error,
            run.world.device,
            folder,
            held_by(state.model, state.optimizer, average=average),
            micro_batch_size=recipe.data.micro_batch_size,
            checkpointing=recipe.memory.checkpointing,
            precision=recipe.precision.mode,
            rank=run.world.rank,
        )
        raise OutOfMemory(text) from error
