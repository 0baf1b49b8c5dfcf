"""A run: assembled from its recipe, trained, and written to its folder."""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.batchnorm import WindowStatistics
from trainer.config import config_hash
from trainer.data.loader import Loader, Source, make_loader
from trainer.errors import BadInputError
from trainer.evaluate import evaluate
from trainer.limits import read_limits, threads_per_rank, workers_per_rank
from trainer.loop import train
from trainer.memory import blocks, candidates
from trainer.observe.console import Display, warn
from trainer.observe.log import Meter, Sink
from trainer.optim import Rates, make_optimizer, parameter_groups, schedule
from trainer.parallel import World, check_agreement, joined_world, replicate
from trainer.plan import Plan, Share, evaluation_share
from trainer.precision import autocast, check_precision, fp32_modules, make_scaler, set_matmul_mode
from trainer.prepare import blank_batch, prepare_model
from trainer.recipe import Recipe
from trainer.run_folder import check_space, make_manifest, open_folder, save_weights, shown, write_json
from trainer.step import Training, take_figures
from trainer.tasks import Task
from trainer.tasks.classification import Classification
from trainer.weights import load_initial


def make_task(recipe: Recipe) -> Task:
    """Opens the data and makes the task that a recipe names."""
    return Classification(recipe.data, recipe.model, recipe.regularization, recipe.seed)


def make_plan(recipe: Recipe, task: Task) -> Plan:
    """The order of a run."""
    return Plan(
        samples=len(task.train_data),
        global_batch=recipe.data.global_batch,
        micro_batch=recipe.data.micro_batch,
        epochs=recipe.epochs,
        last=recipe.window.last,
        seed=recipe.seed,
        max_windows=recipe.max_windows,
    )


def check_request(recipe: Recipe, task: Task, world_size: int) -> None:
    """Finds what would fail on every rank, before there are any.

    Raises:
        BadInputError: What is wrong, and the remedy.
    """
    plan = make_plan(recipe, task)
    if world_size > plan.samples:
        raise BadInputError(
            f"{world_size} ranks for {plan.samples} samples: use at most {plan.samples} ranks"
        )
    Share(plan, 0, world_size)
    model = _shapes_only(task)
    if plan.last == "weighted" and any(
        isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()
    ):
        raise BadInputError(
            "window.last=weighted pads with samples of weight 0, which would enter BatchNorm's statistics; "
            "use window.last=cross, or a model without BatchNorm (small_resnet: model.norm=group)"
        )
    candidates(recipe.memory, model)
    parameter_groups(recipe.optim, model)
    if recipe.compile.mode != "none" and recipe.compile.scope == "blocks" and not blocks(model):
        raise BadInputError(
            "compile.scope=blocks: the model has no repeated blocks (members of a Sequential or ModuleList); "
            "use compile.scope=model"
        )
    fp32_modules(model, recipe.precision.keep_fp32)
    if recipe.model.init_from is not None:
        load_initial(model, recipe.model.init_from, recipe.model.fresh)
    if recipe.parallel.static_graph and plan.shards > world_size:
        raise BadInputError(
            f"parallel.static_graph doesn't go with gradient accumulation (here {plan.shards // world_size} "
            "micro-batches a step): DDP can't tell a step from a part of one; leave it out"
        )
    if recipe.model.name == "small_resnet":
        return  # takes any image; and the imports behind the next lines take three seconds
    try:
        task.loss(model, blank_batch(task, plan.micro_batch, torch.device("meta")))
    except NotImplementedError:  # an operation that has no shapes-only form: the ranks will see
        pass
    except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError) as error:
        what = (str(error) or type(error).__name__).splitlines()[0]
        raise BadInputError(
            f"model.name={recipe.model.name} can't take a micro-batch of this data ({what}); "
            "change the model, data.image_size or data.micro_batch"
        ) from error


def _shapes_only(task: Task) -> nn.Module:
    try:
        with torch.device("meta"):
            return task.model()
    except NotImplementedError:  # some compute their widths with tensors (torchvision's regnet)
        return task.model().to("meta")


@dataclass(frozen=True)
class Parts:
    """What a run is assembled from; tests put in their own."""

    training: Training
    loader: Loader
    evaluation_loader: Loader
    evaluation_share: Share
    compiled: bool
    notes: list[str]


def assemble(recipe: Recipe, task: Task, world: World, workers: int) -> Parts:
    """Builds everything that a rank trains with, on its device."""
    device = world.device
    plan = make_plan(recipe, task)
    share = Share(plan, world.rank, world.size)
    check_precision(recipe.precision, device)
    set_matmul_mode(recipe.precision)
    torch.backends.cudnn.benchmark = recipe.cudnn_benchmark
    prepared = prepare_model(recipe, task, world)
    groups = parameter_groups(recipe.optim, prepared.model)
    rates = Rates(schedule(recipe.optim, plan.windows), device, tuple({group["factor"] for group in groups}))
    training = Training(
        task=task,
        model=prepared.model,
        replica=replicate(prepared.call, world.group, recipe.parallel, device),  # type: ignore[arg-type]
        optimizer=make_optimizer(recipe.optim, groups, rates),
        rates=rates,
        scaler=make_scaler(recipe.precision, device),
        autocast=autocast(recipe.precision, device),
        average=prepared.average,
        statistics=WindowStatistics(prepared.model, world.group),
        share=share,
        clip=recipe.optim.clip,
        group=world.group,
        ragged="units" in task.train_data.fields,
        nonfinite=prepared.nonfinite,
        cuda_graphs=prepared.cuda_graphs,
    )
    source = Source(task.train_data, share, task.train_data.uniforms + task.uniforms)
    measured = len(task.evaluation_data)
    batch = min(recipe.data.evaluation_batch, measured)
    held = evaluation_share(measured, batch, world.rank, world.size)
    return Parts(
        training,
        make_loader(source, device, recipe.data, workers),
        make_loader(Source(task.evaluation_data, held), device, recipe.data, min(workers, 2)),
        held,
        prepared.compiled,
        prepared.notes,
    )


def train_rank(recipe: Recipe, recipe_name: str, folder: Path) -> None:
    """What each rank does, from joining the others to the summary.

    Args:
        recipe: The validated configuration.
        recipe_name: For the manifest.
        folder: The run folder; rank 0 writes to it.

    Raises:
        BadInputError: If the recipe can't be trained here.
    """
    kind = device_kind(recipe)
    with joined_world(kind, recipe.parallel.timeout_s) as world, contextlib.ExitStack() as stack:
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        limits = read_limits()
        threads = recipe.parallel.threads
        threads = threads_per_rank(limits, local_size) if threads == "auto" else threads
        torch.set_num_threads(threads)
        task = make_task(recipe)
        check_request(recipe, task, world.size)
        check_agreement(f"{config_hash(recipe)} {len(task.train_data)} {len(task.evaluation_data)}", world)
        parts = assemble(recipe, task, world, workers_per_rank(limits, local_size))
        stack.callback(parts.loader.close)
        stack.callback(parts.evaluation_loader.close)
        t = parts.training
        plan = t.share.plan
        sinks: list[Sink] = []
        display = None
        if world.rank == 0:
            manifest = make_manifest(recipe, recipe_name, world, plan, threads, task.describe(), parts.notes)
            check_space(folder, t.model, copies=1 if t.average is None else 2)
            sinks = stack.enter_context(open_folder(folder, recipe, manifest))
            display = Display(plan.windows)
            stack.callback(display.close)
            display.say(_opening(manifest, plan, world, folder, t.model))
            for note in parts.notes:
                display.say(f"  {note}")
            sinks.append(display)
            if t.nonfinite is not None:
                sinks.append(t.nonfinite.explain)
        meter = Meter(plan, world.device, sinks, lambda: take_figures(t))
        evaluations: list[dict[str, float]] = []

        def measure(done: int) -> None:
            model = t.model if t.average is None else t.average.averaged()
            figures = evaluate(
                task, model, parts.evaluation_loader, parts.evaluation_share, world, recipe.precision
            )
            evaluations.append(figures)
            meter.deliver()
            meter.emit(
                {"kind": "evaluation", "window": done, "epoch": round(plan.epoch_at(done), 4), **figures}
            )

        began = time.monotonic()

        def window_done(done: int) -> None:
            if display is None:
                return
            display.window_done(done)
            if parts.compiled and done == recipe.compile.warm_up:
                display.say(f"  compiled in {time.monotonic() - began:.0f} s")

        batches = t.share.batches()
        train(
            t,
            parts.loader(batches),
            range(plan.windows),
            meter,
            recipe.log.every,
            _evaluation_due(recipe.evaluate_every, plan),
            measure,
            window_done,
            recipe.compile.warm_up,
        )
        if world.rank == 0:
            _finish(folder, t, meter, task.metric, evaluations[-1], display)


def device_kind(recipe: Recipe) -> Any:
    """ "cuda" or "cpu", from the recipe and what is there.

    Raises:
        BadInputError: If CUDA is asked for where there is none.
    """
    available = torch.cuda.is_available()
    if recipe.device == "cuda" and not available:
        raise BadInputError(
            "device=cuda but no usable GPU was found: use device=cpu, or check nvidia-smi and the driver"
        )
    return "cpu" if recipe.device == "cpu" or not available else "cuda"


def _evaluation_due(every: int, plan: Plan) -> Callable[[int], bool]:
    def due(windows: int) -> bool:
        if windows == plan.windows:
            return True
        return every > 0 and plan.epochs_done(windows) // every > plan.epochs_done(windows - 1) // every

    return due


def _opening(manifest: dict[str, Any], plan: Plan, world: World, folder: Path, model: nn.Module) -> str:
    parameters = sum(p.numel() for p in model.parameters())
    device = (
        manifest["device"]["name"] if world.device.type == "cuda" else f"CPU, {manifest['threads']} threads"
    )
    return (
        f"{manifest['recipe']}: {parameters:,} parameters, {plan.samples:,} samples, {plan.windows:,} "
        f"windows of {plan.global_batch} ({world.size} x {device}; accumulation {manifest['accumulation']})\n"
        f"  run folder {shown(folder)}"
    )


def _finish(
    folder: Path, t: Training, meter: Meter, metric: str, figures: dict[str, float], display: Display | None
) -> None:
    save_weights(t.model, folder / "model.safetensors")
    if t.average is not None:
        save_weights(t.average.averaged(), folder / "ema.safetensors")
    plan = t.share.plan
    speed = meter.timed_samples / max(meter.busy_seconds, 1e-9)
    summary = {**figures, "samples_per_s": speed, "seconds": meter.busy_seconds}
    meter.emit({"kind": "end", "window": plan.windows, **summary})
    manifest = json.loads((folder / "manifest.json").read_text())
    diverged = not all(math.isfinite(figure) for figure in figures.values())
    status = "diverged" if diverged else "finished"
    write_json(folder / "manifest.json", {**manifest, "status": status, "summary": summary})
    if diverged:
        warn(
            "the evaluation isn't finite: the run diverged; lower optim.lr or set optim.clip "
            "(precision.debug=true says where it began)"
        )
    if display is None:
        return
    display.close()
    programs = Path(sys.executable).parent
    board = f"{shown(programs / 'tensorboard')} --logdir {shown(folder.parent)}\n               "
    display.say(
        f"\n  {metric:<12} {figures[metric]:.4f}\n"
        f"  throughput   {speed:,.0f} samples/s ({meter.busy_seconds:.1f} s of training)\n"
        f"  run folder   {shown(folder)}\n"
        f"  next         {board if (folder / 'tensorboard').exists() else ''}"
        f"{shown(programs / 'trainer')} train {manifest['recipe']} --set optim.lr=…"
        " (--help-config shows every key)"
    )
