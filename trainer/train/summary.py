"""What a run says at its start and at its end, and what it leaves then."""

import math
import shutil
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from trainer.checkpoint import FOLDER
from trainer.checkpoint.store import listing
from trainer.data.sampling.plan import Plan
from trainer.distributed.parallel import World
from trainer.errors import BadInputError, DivergedError
from trainer.observe.advice import Advisor
from trainer.observe.console import ProgressBar
from trainer.observe.diagnosis import Verdict
from trainer.observe.log import MetricLogger
from trainer.observe.phases import PHASES
from trainer.train.manifest import file_hash, outcome
from trainer.train.progress import finite
from trainer.train.report.write import NAME, leave_report
from trainer.train.run import Parts
from trainer.train.run_folder import save_weights, shown, write_json
from trainer.train.step import Training

_WORTH_A_WORD = 0.005  # of the time
_PARTS = (*PHASES, "unexplained")


def introduce(manifest: dict[str, Any], parts: Parts, world: World, folder: Path) -> ProgressBar:
    """Shows what is about to be trained, and where; returns the progress_bar."""
    plan = parts.training.share.plan
    progress_bar = ProgressBar(plan.steps)
    progress_bar.say(_opening(manifest, plan, world, folder, parts.training.model))
    for note in manifest["notes"]:
        progress_bar.say(f"  {note}")
    return progress_bar


def finish(
    folder: Path,
    manifest: dict[str, Any],
    t: Training,
    logger: MetricLogger,
    metric: str,
    metrics: dict[str, float],
    progress_bar: ProgressBar,
    advisor: Advisor | None = None,
) -> None:
    """Writes the weights and the summary, and tells it.

    Raises:
        DivergedError: If the evaluation isn't finite.
    """
    weights = _leave_weights(folder, t)
    plan = t.share.plan
    speed = logger.timed_samples / max(logger.busy_seconds, 1e-9)
    summary = {**metrics, "samples_per_s": speed, "seconds": logger.busy_seconds}
    verdict = advisor.conclude(plan.steps, logger.rest()) if advisor else None
    totals = advisor.totals(speed) if advisor else {}
    logger.emit({"kind": "end", "step": plan.steps, **summary, **totals})
    diverged = not all(math.isfinite(metric) for metric in metrics.values())
    status = "diverged" if diverged else "finished"
    manifest.update({"weights": weights, "summary": finite(summary)})
    try:
        write_json(folder / "manifest.json", {**manifest, **outcome(folder), "status": status})
    except OSError as error:
        raise _unfinished(folder, "manifest.json", error) from error
    leave_report(folder)
    if diverged:
        raise DivergedError(
            "the evaluation isn't finite: the run diverged; lower optim.lr or set optim.max_grad_norm "
            "(precision.debug=true says where it began)"
        )
    progress_bar.close()
    programs = Path(sys.executable).parent
    board = f"{_as_typed(programs / 'tensorboard')} --logdir {shown(folder.parent)}\n               "
    progress_bar.say(
        f"\n  {metric:<12} {metrics[metric]:.4f}\n"
        f"  throughput   {speed:,.0f} samples/s ({logger.busy_seconds:.1f} s of training)\n"
        f"{_explained(totals, verdict)}"
        f"  run folder   {shown(folder)}\n"
        f"{_report_line(folder)}"
        f"  next         {board if (folder / 'tensorboard').exists() else ''}"
        f"{_as_typed(programs / 'trainer')} train {manifest['recipe']} --set optim.lr=…"
        " (--help-config shows every key)"
    )


def _leave_weights(folder: Path, t: Training) -> dict[str, str]:
    """Writes the weights, and the average; returns their hashes by the files' names."""
    contexts: dict[str, AbstractContextManager[None]] = {"model.safetensors": nullcontext()}
    if t.average is not None:
        contexts["ema.safetensors"] = t.average.in_place()
    try:
        for name, context in contexts.items():
            with context:
                save_weights(t.model, folder / name)
        return {name: file_hash(folder / name) for name in contexts}
    except (OSError, SafetensorError) as error:
        raise _unfinished(folder, "the final weights", error) from error


def _unfinished(folder: Path, what: str, error: Exception) -> BadInputError:
    """What can't be written at the end, what is kept, and how to finish from it."""
    newest = max((entry.step for entry in listing(folder / FOLDER)), default=None)
    kept = (
        "there is no checkpoint: the run must be repeated"
        if newest is None
        else f"the checkpoint of step {newest} is kept: mend that, and the same command ends from there"
    )
    return BadInputError(f"{folder}: {what} can't be written ({_why(error)}); {kept}")


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _as_typed(program: Path) -> str:
    """A program by its name, if that is the one that a shell finds; in the image it lies elsewhere."""
    found = shutil.which(program.name)
    other = found is None or (program.exists() and not program.samefile(found))
    return str(shown(program)) if other else program.name


def _explained(totals: Mapping[str, float], verdict: Verdict | None) -> str:
    """Lines on where the time went, what it cost, and what to change."""
    if verdict is None:
        return ""
    wall = max(totals["time/wall"], 1e-9)
    parts = sorted(((totals.get(f"time/{name}", 0.0) / wall, name) for name in _PARTS), reverse=True)
    shares = [f"{name} {share:.0%}" for share, name in parts if share >= _WORTH_A_WORD]
    cost = []
    if "energy/joules" in totals:
        cost.append(f"{totals['energy/joules'] / 3.6e6:.3g} kWh")
    if "cost/money" in totals:
        cost.append(
            f"{totals['cost/money']:.4g} (per thousand samples {totals['cost/per_thousand_samples']:.3g})"
        )
    lines = {
        "time": ", ".join(shares),
        "cost": ", ".join(cost),
        "verdict": verdict.text,
    }
    return "".join(f"  {name:<12} {line}\n" for name, line in lines.items() if line)


def _report_line(folder: Path) -> str:
    report = folder / NAME
    return f"  report       {shown(report)}\n" if report.exists() else ""


def _opening(manifest: dict[str, Any], plan: Plan, world: World, folder: Path, model: nn.Module) -> str:
    parameters = sum(p.numel() for p in model.parameters())
    device = (
        manifest["device"]["name"] if world.device.type == "cuda" else f"CPU, {manifest['threads']} threads"
    )
    return (
        f"{manifest['recipe']}: {parameters:,} parameters, {plan.samples:,} samples, {plan.steps:,} "
        f"steps of {plan.global_batch_size} ({world.size} x {device}; accumulation "
        f"{manifest['gradient_accumulation_steps']})\n  run folder {shown(folder)}"
    )
