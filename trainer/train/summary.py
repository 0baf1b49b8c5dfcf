"""Console messages of a run at its start and end, and its final files."""

import math
import shutil
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from trainer.checkpoint.store import listing
from trainer.config.data import DataConfig
from trainer.config.training import MAIN_SET
from trainer.data.corrupt import Quarantine
from trainer.distributed.parallel import World, words_of_ranks
from trainer.errors import BadInputError, DivergedError
from trainer.host.here import path_shown
from trainer.observe.advice import Advisor
from trainer.observe.console import ProgressBar, warn
from trainer.observe.diagnosis import Verdict
from trainer.observe.log import Logged, MetricLogger
from trainer.observe.phases import PHASES
from trainer.observe.sinks import finite
from trainer.runs.folder import checkpoints_of
from trainer.runs.manifest import Manifest, update_manifest
from trainer.runs.report.read import REPLACED
from trainer.runs.report.write import NAME, leave_report
from trainer.train.evaluate import in_set, out_of_patience
from trainer.train.recording import save_weights
from trainer.train.state import Run, TrainState, whole_model

_LEAST_SHOWN = 0.005  # fraction of the time
_MODULES = {"trainer": "trainer", "tensorboard": "tensorboard.main"}
_PARTS = (*PHASES, "unexplained")


def introduce(manifest: Manifest, run: Run, folder: Path) -> ProgressBar:
    """Prints model, data and run folder at the start of an attempt; returns the progress bar."""
    progress_bar = ProgressBar(run.plan.steps, run.state.step)
    progress_bar.say(_opening(manifest, run, folder))
    for note in manifest.notes:
        progress_bar.say(f"  {note}")
    return progress_bar


def finish(
    folder: Path,
    run: Run,
    manifest: Manifest,
    logger: MetricLogger,
    progress_bar: ProgressBar,
    advisor: Advisor | None,
    gathered: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
) -> None:
    """Writes final weights, summary and report, and prints the summary.

    Args:
        folder: The run folder.
        run: The run after its last step.
        manifest: Its manifest, which is updated.
        logger: Logs the record of kind "end".
        progress_bar: The console.
        advisor: Names the bottleneck, or None.
        gathered: From `gather_weights`, if the run is sharded.

    Raises:
        BadInputError: If a file can't be written.
        DivergedError: If the loss, or the deciding metric, isn't finite.
    """
    metric, metrics, logged = run.task.metric, run.state.metrics, logger.logged
    weights = _leave_weights(folder, run.state, gathered or {})
    speed = logged.samples / max(logged.seconds, 1e-9)
    summary = {**metrics, "samples_per_s": speed, "seconds": logged.seconds}
    verdict = advisor.conclude(run.state.step, logger.rest()) if advisor else None
    trained = run.state.step * run.plan.global_batch_size
    totals = advisor.totals(trained) if advisor else {}
    logger.emit({"kind": "end", "step": run.state.step, **summary, **totals})
    decisive = [in_set(run.recipe.evaluation.decides, name) for name in dict.fromkeys(("loss", metric))]
    odd = [name for name, value in metrics.items() if not math.isfinite(value)]
    diverged = [f"{name} is {metrics[name]:g}" for name in decisive if name in odd]
    try:
        update_manifest(
            folder,
            manifest,
            weights=weights,
            summary=finite(summary),
            steps_done=run.state.step,
            out_of_patience=run.state.no_better if out_of_patience(run) else 0,
            finished_by_hook=run.state.step < run.steps and not out_of_patience(run),
            status="diverged" if diverged else "finished",
        )
    except OSError as error:
        raise _unfinished(folder, "manifest.json", error) from error
    leave_report(folder)
    if diverged:
        raise DivergedError(
            f"the last evaluation isn't finite ({', '.join(diverged)}): the run diverged; lower optim.lr or "
            "set optim.max_grad_norm (precision.debug=true says where it began)"
        )
    progress_bar.close()
    if odd:
        warn(f"the last evaluation isn't finite in {', '.join(odd)} (null in rows): it doesn't decide")
    programs = Path(sys.executable).parent
    board = f"{_as_typed(programs / 'tensorboard')} --logdir {path_shown(folder.parent)}\n               "
    setting = "seed=…" if hasattr(run.task, "optimizer") else "optim.lr=…"  # a key that has an effect
    again = f"{_as_typed(programs / 'trainer')} train {manifest.recipe} --set {setting}"
    if run.recipe.task == "own":  # a class of this process
        again = "fit(…) with other settings"
    progress_bar.say(
        f"\n  {metric:<12} {metrics[metric]:.4f}\n"
        f"{_others(run)}"
        f"{_early(run)}"
        f"{replaced_line(metrics, run.recipe.data)}"
        f"{_throughput(logged)}"
        f"{_explained(totals, verdict)}"
        f"  run folder   {path_shown(folder)}\n"
        f"{_report_line(folder)}"
        f"  next         {board if (folder / 'tensorboard').exists() else ''}"
        f"{again} (--help-config shows every key)"
    )


def _throughput(logged: Logged) -> str:
    if not logged.seconds:  # a run of one step
        return ""
    speed = logged.samples / logged.seconds
    return f"  throughput   {speed:,.0f} samples/s ({logged.seconds:.1f} s of training)\n"


def _others(run: Run) -> str:
    """Returns a line for each additional evaluation set, with a mark on the deciding one."""
    metric, metrics = run.task.metric, run.state.metrics
    names = run.recipe.evaluation.sets
    width = max([12, *map(len, names)])
    decided = {run.recipe.evaluation.decides: "  (decides)"}
    return "".join(
        f"  {name:<{width}} {metric} {metrics[in_set(name, metric)]:.4f}{decided.get(name, '')}\n"
        for name in names
    )


def _early(run: Run) -> str:
    """Returns a line on early stopping; "" if the run reached its last step."""
    state = run.state
    if state.step == run.steps:
        return ""
    if state.best is None or not out_of_patience(run):
        return f"  ended        at step {state.step} of {run.steps}, as a hook asked\n"
    decides = run.recipe.evaluation.decides
    on = "" if decides == MAIN_SET else f" on {decides}"
    return (
        f"  ended        at step {state.step} of {run.steps}: no evaluation since step {state.best[1]} was "
        f"better{on} ({state.no_better} in a row: evaluation.patience)\n"
    )


def gather_weights(run: Run) -> dict[str, dict[str, torch.Tensor]]:
    """Returns unsharded weights and their average, by file and name, on rank 0; collective, {} unsharded."""
    gathered = {}
    if run.state.rows is not None:
        for name, context in _weights(run.state).items():
            with context:
                gathered[name] = whole_model(run.state)
    return gathered


def _weights(state: TrainState) -> dict[str, AbstractContextManager[None]]:
    """Returns the files of final weights, each with the context in which the model has these weights."""
    contexts: dict[str, AbstractContextManager[None]] = {"model.safetensors": nullcontext()}
    if state.average is not None:
        contexts["ema.safetensors"] = state.average.in_place()
    return contexts


def _leave_weights(
    folder: Path, state: TrainState, gathered: Mapping[str, Mapping[str, torch.Tensor]]
) -> dict[str, str]:
    """Writes the final weights and their average; returns SHA-256 by file name."""
    hashes = dict[str, str]()
    try:
        for name, context in _weights(state).items():
            with context:
                hashes[name] = save_weights(state.model, folder / name, gathered.get(name))
    except OSError as error:
        raise _unfinished(folder, "the final weights", error) from error
    return hashes


def _unfinished(folder: Path, what: str, error: OSError) -> BadInputError:
    """Returns the error for a final file that can't be written: how to finish from the newest checkpoint."""
    newest = max((entry.step for entry in listing(checkpoints_of(folder))), default=None)
    kept = (
        "there is no checkpoint: the run must be repeated"
        if newest is None
        else f"the checkpoint of step {newest} is kept: mend that, and the same command ends from there"
    )
    return BadInputError(f"{folder}: {what} can't be written ({error.strerror or error}); {kept}")


def _as_typed(program: Path) -> str:
    """Returns the words to call a program: its name where a shell finds it, its path, or `python -m`."""
    on_path = shutil.which(program.name)
    if not program.exists():  # run from its sources, by `python -m trainer`
        return f"{_as_typed(Path(sys.executable))} -m {_MODULES[program.name]}"
    other = on_path is None or not program.samefile(on_path)
    return str(path_shown(program)) if other else program.name


def _explained(totals: Mapping[str, float], verdict: Verdict | None) -> str:
    """Returns lines on time by phase, cost, and verdict; "" without a verdict."""
    if verdict is None:
        return ""
    wall = max(totals["time/wall"], 1e-9)
    parts = sorted(((totals.get(f"time/{name}", 0.0) / wall, name) for name in _PARTS), reverse=True)
    fractions = [f"{name} {fraction:.0%}" for fraction, name in parts if fraction >= _LEAST_SHOWN]
    cost = []
    if "energy/joules" in totals:
        cost.append(f"{totals['energy/joules'] / 3.6e6:.3g} kWh")
    if "cost/money" in totals:
        cost.append(
            f"{totals['cost/money']:.4g} (per thousand samples {totals['cost/per_thousand_samples']:.3g})"
        )
    lines = {
        "time": ", ".join(fractions),
        "cost": ", ".join(cost),
        "verdict": verdict.text,
    }
    return "".join(f"  {name:<12} {line}\n" for name, line in lines.items() if line)


def _report_line(folder: Path) -> str:
    report = folder / NAME
    return f"  report       {path_shown(report)}\n" if report.exists() else ""


def _opening(manifest: Manifest, run: Run, folder: Path) -> str:
    plan, world = run.plan, run.world
    parameters = sum(p.numel() for p in run.state.model.parameters())
    threads = f"{manifest.threads} thread{'s' * (manifest.threads > 1)}"
    device = manifest.device.name if world.device.type == "cuda" else f"CPU, {threads}"
    return (
        f"{manifest.recipe}: {parameters:,} parameters, {plan.samples:,} samples, {plan.steps:,} "
        f"steps of {plan.global_batch_size} ({world.size} x {device}; accumulation "
        f"{manifest.gradient_accumulation_steps})\n  run folder {path_shown(folder)}"
    )


def gather_replaced(run: Run) -> dict[str, float]:
    """Counts replaced samples over all ranks, by data set, for data sets that had any; collective.

    With data.on_corrupt=quarantine those of earlier attempts count, too: quarantine.jsonl has them.
    """
    if run.recipe.data.on_corrupt == "fail":
        return {}
    return count_replaced(run.quarantines, run.world)


def count_replaced(quarantines: Mapping[str, Quarantine], world: World) -> dict[str, float]:
    """Counts the samples of quarantines over all ranks, as `gather_replaced`; collective."""
    counts = {}
    for what, quarantine in quarantines.items():
        words = words_of_ranks(" ".join(map(str, sorted(quarantine.samples))), world)
        counts[what] = len(set(" ".join(words).split()))
    return {f"{REPLACED}{what}": float(count) for what, count in counts.items() if count}


def replaced_line(metrics: Mapping[str, float], data: DataConfig) -> str:
    """Returns a line for the console; "" if no sample was replaced."""
    counts = [
        f"{count:,.0f} {name.removeprefix(REPLACED)}"
        for name, count in metrics.items()
        if name.startswith(REPLACED)
    ]
    if not counts:
        return ""
    named = "; quarantine.jsonl names them" if data.on_corrupt == "quarantine" else ""
    return f"  replaced     {', '.join(counts)} samples, which can't be decoded{named}\n"
