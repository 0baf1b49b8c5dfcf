"""A rank of a probe: `python -m trainer.tune.probe FOLDER`. It trains some windows, and tells what they took.

All that a run holds is there: the real model, data and loader, optimiser state, average, compiled code, the
copy that a checkpoint is written from, batches of evaluation. No run folder is made.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE, OutOfMemory
from trainer.rank import run_rank, write_whole

if TYPE_CHECKING:
    import torch

    from trainer.recipe import Recipe
    from trainer.run import Parts

# What a failed allocation in native code says, besides torch's own words.
_NATIVE = ("could not create a primitive", "bad_alloc", "can't start new thread", "Cannot allocate memory")
_EVALUATED = 2  # batches on each rank
_TIMED = 10  # windows at most, if these take less than:
_TIMED_SECONDS = 0.5


def probe_recipe(recipe: Recipe, micro_batch: int, ranks: int) -> dict[str, Any]:
    """Values of a recipe that shows the same peak in few windows.

    A window of two micro-batches holds what one of many does: gradients, and the activations of one. But a
    tree of sums grows with the window. Two windows at least, for optimiser state appears in the first.
    """
    values = recipe.model_dump(mode="json")
    accumulation = recipe.data.global_batch // (micro_batch * ranks)
    if recipe.parallel.reduction != "tree":
        accumulation = min(accumulation, 2)
    values["data"] |= {"micro_batch": micro_batch, "global_batch": micro_batch * ranks * accumulation}
    last = "weighted" if recipe.window.last == "weighted" else "cross"
    windows = recipe.compile.warm_up + 1 + _TIMED
    values |= {"window": {"last": last}, "epochs": 10**9, "max_windows": windows, "evaluate_every": 0}
    return values


def main(folder: Path) -> int:
    """Does a rank's part; what it has to say lies in the folder, also when it fails or is killed."""
    from trainer.observe.oom import is_out_of_memory

    rank = int(os.environ["RANK"])
    os.dup2(os.open(folder / f"rank-{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
    write_whole(folder / f"rank-{rank}.pid", str(os.getpid()))
    told: dict[str, Any] = {"phase": "start", "ran_out": ""}

    def tell(**more: Any) -> None:
        told.update(more)
        write_whole(folder / f"rank-{rank}.json", json.dumps(told))

    request = json.loads((folder / "request.json").read_bytes())
    try:
        return _train(request, tell)
    except OutOfMemory as error:
        tell(ran_out=str(error))
    except (RuntimeError, MemoryError, OSError) as error:
        native = isinstance(error, RuntimeError) and any(text in str(error) for text in _NATIVE)
        none_left = isinstance(error, OSError) and error.errno == errno.ENOMEM
        if not (is_out_of_memory(error) or native or none_left):
            raise
        tell(ran_out=str(error).splitlines()[0][:300] or type(error).__name__)
    return EXIT_FAILED


def _train(request: dict[str, Any], tell: Any) -> int:
    import torch

    import trainer.attempt  # noqa: F401  (a run has that in memory, too)
    from trainer.checkpoint.background import stage
    from trainer.evaluate import evaluate
    from trainer.explain import memory_explained
    from trainer.limits import read_limits, workers_per_rank
    from trainer.parallel import joined_world, sum_over_ranks
    from trainer.plan import evaluation_share
    from trainer.preempt import requested
    from trainer.recipe import Recipe
    from trainer.run import assemble, device_kind, make_task
    from trainer.state import tensors_of
    from trainer.step import train_window
    from trainer.tune.host_memory import cap_own

    recipe = Recipe.model_validate(request["recipe"])
    kind = device_kind(recipe)
    torch.set_num_threads(request["threads"])
    if kind == "cpu" and request["room"]:
        cap_own(request["room"])
    if "tensorboard" in recipe.log.sinks:
        import tensorboard.summary  # noqa: F401
    task = make_task(recipe)
    with joined_world(kind, recipe.parallel.timeout_s) as world:
        workers = workers_per_rank(read_limits(), int(os.environ["LOCAL_WORLD_SIZE"]))
        parts = assemble(recipe, task, world, workers)
        t = parts.training
        try:
            with memory_explained(recipe, parts, world, None):
                tell(phase="training", held=_holders(parts))
                t.replica.train()
                batches = parts.loader(t.share.batches())
                staged: Any = None
                first, end = recipe.compile.warm_up, recipe.compile.warm_up + 1
                for window in range(t.share.plan.windows):
                    if requested():
                        return EXIT_REQUEUE
                    if window == first:
                        began = _now(world.device)
                    train_window(t, batches, window)
                    if window == 0:
                        tell(held=_holders(parts))
                    if staged is None and world.rank == 0:
                        staged = stage(tensors_of(t))
                    if window == first:
                        # As many on every rank: what takes long isn't trained more often than it must be.
                        took = torch.tensor(_now(world.device) - began, device=world.device)
                        longest = float(sum_over_ranks(took, world.group)) / world.size
                        end += min(_TIMED, int(_TIMED_SECONDS / max(longest, 1e-3)))
                    if window + 1 == end:
                        break
                seconds = (_now(world.device) - began) / (end - first)
                tell(phase="evaluation", samples_per_s=t.share.plan.global_batch / seconds)
                measured, batch = len(task.evaluation_data), parts.evaluation_share.plan.micro_batch
                few = evaluation_share(
                    min(measured, _EVALUATED * batch * world.size), batch, world.rank, world.size
                )
                model = t.model if t.average is None else t.average.averaged()
                evaluate(task, model, parts.evaluation_loader, few, world, recipe.precision)
            tell(phase="done", **_peaks(world.device))
        finally:
            parts.loader.close()
            parts.evaluation_loader.close()
    return EXIT_DONE


def _holders(parts: Parts) -> dict[str, int]:
    from trainer.observe.oom import held_by

    t = parts.training
    average = t.average.model.parameters() if t.average is not None else ()
    return held_by(t.model, t.optimizer, average=average)


def _peaks(device: torch.device) -> dict[str, int]:
    """The most that was in use: of the host by this process, of a GPU by all."""
    import torch

    from trainer.tune.host_memory import own_peak

    resident, files = own_peak()
    figures = {"resident": resident, "files": files}
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        outside = total - free - torch.cuda.memory_reserved(device)  # CUDA's context, NCCL, other processes
        figures |= {"device": torch.cuda.max_memory_reserved(device) + outside, "device_total": total}
    return figures


def _now(device: torch.device) -> float:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    sys.exit(run_rank(lambda: main(Path(sys.argv[1]))))
