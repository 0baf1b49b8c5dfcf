"""Training of a probe: all that a run holds in memory, in few steps, without a run folder.

It has the real model, data and loader, optimizer state, average, compiled code, the copy that a checkpoint is
written from, and batches of an evaluation.
"""

import os
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch

import trainer.train.start.rank  # noqa: F401  (a run has these modules in memory, too)
from trainer.checkpoint.background import make_room, stage
from trainer.config.recipe import Recipe
from trainer.data.sampling.plan import evaluation_share
from trainer.distributed.parallel import World, joined_world, sum_over_ranks
from trainer.errors import EXIT_DONE, EXIT_REQUEUE
from trainer.host.affinity import limits_within, unpin_main_thread
from trainer.host.allocator import check_allocator
from trainer.host.limits import read_limits
from trainer.host.memory_room import cap_own
from trainer.host.nvml import driver_version
from trainer.host.processes import peak_bytes, status_of
from trainer.launch.worker import cpu_shares, requested
from trainer.observe.oom import held_by
from trainer.train.components.loading import choose_loading
from trainer.train.components.run import build
from trainer.train.components.task import device_kind, make_task
from trainer.train.evaluate import evaluate
from trainer.train.outputs import memory_explained
from trainer.train.state import Run, tensors_of
from trainer.train.step import train_step

Tell = Callable[[dict[str, Any]], None]

_EVALUATED = 2  # batches on each rank
_TIMED = 10  # most steps that are timed
_TIMED_SECONDS = 0.5  # most seconds for them


def probe_recipe(recipe: Recipe, micro_batch_size: int, ranks: int) -> dict[str, Any]:
    """Returns the values of a recipe with the same peak memory in few steps.

    A step of two micro-batches has the same peak as one of many: gradients, and the activations of one. Only
    a tree of sums grows with the step. There are at least two steps, as the first allocates optimizer state.
    """
    values = recipe.model_dump(mode="json")
    gradient_accumulation_steps = recipe.data.global_batch_size // (micro_batch_size * ranks)
    if recipe.parallel.reduction != "tree":
        gradient_accumulation_steps = min(gradient_accumulation_steps, 2)
    values["data"] |= {
        "micro_batch_size": micro_batch_size,
        "global_batch_size": micro_batch_size * ranks * gradient_accumulation_steps,
        "last_batch": "weighted" if recipe.data.last_batch == "weighted" else "cross",
    }
    steps = recipe.compile.warm_up + 1 + _TIMED
    values |= {"epochs": 10**9, "max_steps": steps, "evaluation": {"every": "end"}}
    return values


def train_some(request: dict[str, Any], report: Tell) -> int:
    """Trains a rank of a probe; returns its exit code.

    Args:
        request: `recipe`; `threads`; and `room`, the bytes that the job may use, or 0.
        report: Called with results: `held` by name, `samples_per_s` of the job, and the peaks.
    """
    recipe = Recipe.model_validate(request["recipe"])
    kind = device_kind(recipe)
    unpin_main_thread(cpu_shares())
    torch.set_num_threads(request["threads"])
    if kind == "cpu" and request["room"]:
        cap_own(request["room"])
    if kind == "cuda":
        check_allocator(recipe.memory.allocator, os.environ, driver_version)
    if "tensorboard" in recipe.log.to:
        import tensorboard.summary.writer  # noqa: F401
    task = make_task(recipe)
    with ExitStack() as stack:
        world = stack.enter_context(joined_world(kind, recipe.parallel.timeout_s))
        limits, local = limits_within(read_limits(), cpu_shares()), int(os.environ["LOCAL_WORLD_SIZE"])
        setting = choose_loading(recipe, task, limits, local).setting
        run = build(recipe, task, world, setting.workers, prefetch=setting.prefetch)
        stack.callback(run.close)
        report({"held": _holders(run)})
        with memory_explained(run, None):
            if not _steps(recipe, run, world, report):
                return EXIT_REQUEUE
            _evaluate(recipe, run, world)
        report(_peaks(world.device))
    return EXIT_DONE


def _steps(recipe: Recipe, run: Run, world: World, report: Tell) -> bool:
    """Trains and times some steps; returns False if a signal ended them."""
    batches = run.loader(run.share.batches())
    staged: Any = None
    timed, end, began = recipe.compile.warm_up, recipe.compile.warm_up + 1, 0.0
    for step in range(run.plan.steps):
        if requested():
            return False
        if step == timed:
            began = _now(world.device)
        train_step(run, batches, step)
        if step == 0:
            report({"held": _holders(run)})
            # The copy for a checkpoint, on ranks that write: a run holds it while it trains the next steps.
            rows = run.state.rows
            writes = world.rank == 0 if rows is None else rows.first
            if writes:
                tensors = tensors_of(run.state)
                staged = stage(tensors, make_room(tensors))
        if step == timed:
            # As many more steps as the mean over the ranks allows, the same number on each.
            mean = _mean(_now(world.device) - began, world)
            end += min(_TIMED, int(_TIMED_SECONDS / max(mean, 1e-3)))
        if step + 1 == end:
            break
    seconds = (_now(world.device) - began) / (end - timed)
    report({"samples_per_s": run.plan.global_batch_size / seconds})
    del staged
    return True


def _mean(seconds: float, world: World) -> float:
    """Returns the mean over the ranks."""
    return float(sum_over_ranks(torch.tensor(seconds, device=world.device), world.group)) / world.size


def _evaluate(recipe: Recipe, run: Run, world: World) -> None:
    whole = run.evaluation_share.plan
    few = min(whole.samples, _EVALUATED * whole.micro_batch_size * world.size)
    share = evaluation_share(few, whole.micro_batch_size, world.rank, world.size)
    with nullcontext() if run.state.average is None else run.state.average.in_place():
        evaluate(run.task, run.state.model, run.evaluation_loader, share, world, recipe.precision)


def _holders(run: Run) -> dict[str, int]:
    average = run.state.average.tensors.values() if run.state.average is not None else ()
    return held_by(run.state.model, run.state.optimizer, average=average)


def _peaks(device: torch.device) -> dict[str, int]:
    """Returns peak memory in bytes: on the host of this process, on a GPU of all processes."""
    resident, files = peak_bytes(), status_of().get("RssFile", 0)
    metrics = {"resident": resident, "files": files}
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        outside = total - free - torch.cuda.memory_reserved(device)  # CUDA's context, NCCL, other processes
        metrics |= {"device": torch.cuda.max_memory_reserved(device) + outside, "device_total": total}
    return metrics


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
