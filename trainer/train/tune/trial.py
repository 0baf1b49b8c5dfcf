"""What a probe trains: all that a run holds, in few steps, without a run folder.

The real model, data and loader, optimiser state, average, compiled code, the copy that a checkpoint is
written from, and batches of evaluation.
"""

import os
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch

import trainer.train.attempt  # noqa: F401  (a run has its modules in memory, too)
from trainer.checkpoint.background import stage
from trainer.config.recipe import Recipe
from trainer.data.sampling.plan import evaluation_share
from trainer.distributed.parallel import World, joined_world, sum_over_ranks
from trainer.errors import EXIT_DONE, EXIT_REQUEUE
from trainer.host.affinity import shares_of, unpin_main_thread, within
from trainer.host.limits import read_limits
from trainer.host.memory import cap_own, own_peak
from trainer.launch.signals import requested
from trainer.observe.oom import held_by
from trainer.observe.peak import tells_figures
from trainer.train.allocator import set_up_allocator
from trainer.train.evaluate import evaluate
from trainer.train.explain import memory_explained
from trainer.train.loading import settle
from trainer.train.run import Parts, assemble, device_kind, make_task
from trainer.train.state import tensors_of
from trainer.train.step import train_step

Tell = Callable[[dict[str, Any]], None]

_EVALUATED = 2  # batches on each rank
_TIMED = 10  # steps at most, if they take less than:
_TIMED_SECONDS = 0.5


def probe_recipe(recipe: Recipe, micro_batch_size: int, ranks: int) -> dict[str, Any]:
    """Values of a recipe that shows the same peak in few steps.

    A step of two micro-batches holds what one of many does: gradients, and the activations of one. But a
    tree of sums grows with the step. Two steps at least, for optimiser state appears in the first.
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
    values |= {"epochs": 10**9, "max_steps": steps, "evaluate_every": 0}
    return values


def train_some(request: dict[str, Any], tell: Tell) -> int:
    """Trains a rank's part of a probe; returns its exit code.

    Args:
        request: `recipe`, `threads`, and `room`: bytes that the job may have, or 0.
        tell: Takes metrics: `held` by name, `samples_per_s` of the job, and the peaks.
    """
    recipe = Recipe.model_validate(request["recipe"])
    kind = device_kind(recipe)
    unpin_main_thread()
    torch.set_num_threads(request["threads"])
    if kind == "cpu" and request["room"]:
        cap_own(request["room"])
    if kind == "cuda":
        set_up_allocator(recipe.memory.allocator, os.environ)
    if "tensorboard" in recipe.log.to:
        import tensorboard.summary.writer  # noqa: F401
    task = make_task(recipe)
    with ExitStack() as stack:
        world = stack.enter_context(joined_world(kind, recipe.parallel.timeout_s))
        limits, local = within(read_limits(), shares_of(os.environ)), int(os.environ["LOCAL_WORLD_SIZE"])
        settled, workers, _ = settle(recipe, task, limits, local, os.environ)
        parts = assemble(settled, task, world, workers)
        stack.callback(parts.loader.close)
        stack.callback(parts.evaluation_loader.close)
        tell({"held": _holders(parts)})
        with memory_explained(recipe, parts, world, None):
            if not _steps(recipe, parts, world, tell):
                return EXIT_REQUEUE
            _evaluate(recipe, parts, world)
        tell(_peaks(world.device))
    return EXIT_DONE


def _steps(recipe: Recipe, parts: Parts, world: World, tell: Tell) -> bool:
    """False: a signal ended them."""
    t = parts.training
    t.replica.train()
    batches = parts.loader(t.share.batches())
    staged: Any = None
    timed, end, began = recipe.compile.warm_up, recipe.compile.warm_up + 1, 0.0
    for step in range(t.share.plan.steps):
        if requested():
            return False
        if step == timed:
            began = _now(world.device)
        train_step(t, batches, step)
        if step == 0:
            tell({"held": _holders(parts)})
            # Of the rank that writes checkpoints; it is there while the next steps are trained.
            staged = stage(tensors_of(t)) if world.rank == 0 else None
        if step == timed:
            # As many more on every rank as the mean of their times allows.
            took = torch.tensor(_now(world.device) - began, device=world.device)
            mean = float(sum_over_ranks(took, world.group)) / world.size
            end += min(_TIMED, int(_TIMED_SECONDS / max(mean, 1e-3)))
        if step + 1 == end:
            break
    seconds = (_now(world.device) - began) / (end - timed)
    tell({"samples_per_s": t.share.plan.global_batch_size / seconds})
    del staged
    return True


def _evaluate(recipe: Recipe, parts: Parts, world: World) -> None:
    t, whole = parts.training, parts.evaluation_share.plan
    few = min(whole.samples, _EVALUATED * whole.micro_batch_size * world.size)
    share = evaluation_share(few, whole.micro_batch_size, world.rank, world.size)
    with nullcontext() if t.average is None else t.average.in_place():
        evaluate(t.task, t.model, parts.evaluation_loader, share, world, recipe.precision)


def _holders(parts: Parts) -> dict[str, int]:
    t = parts.training
    average = t.average.tensors.values() if t.average is not None else ()
    return held_by(t.model, t.optimizer, average=average)


def _peaks(device: torch.device) -> dict[str, int]:
    """The most that was in use: of the host by this process, of a GPU by all."""
    resident, files = own_peak()
    metrics = {"resident": resident, "files": files}
    if device.type == "cuda" and tells_figures():  # managed memory isn't bounded by the device
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        outside = total - free - torch.cuda.memory_reserved(device)  # CUDA's context, NCCL, other processes
        metrics |= {"device": torch.cuda.max_memory_reserved(device) + outside, "device_total": total}
    return metrics


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
