"""Entry point of a rank of a trial: `trainer.train.start.micro_batch_rank LAUNCH-FOLDER`."""

import json
import os
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import EXIT_DONE, EXIT_FAILED
from trainer.host.files import write_whole
from trainer.launch.worker import Worker

if TYPE_CHECKING:
    import torch

_EVALUATED = 2  # batches on each rank


def main(folder: str) -> int:
    """Trains as a rank of a trial; returns the exit code. The result is written to the trial's folder."""
    with Worker(folder) as worker:  # before the slow imports, so that a signal finds a handler
        file = Path(worker.request["folder"], f"rank-{os.environ['RANK']}.json")
        worker.code = _tried(worker.request, file)
    return worker.exit_code


def _tried(request: dict[str, Any], file: Path) -> int:
    from trainer.observe.oom import is_out_of_memory

    try:
        write_whole(file, json.dumps(train_some(request)))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error, probing=True):
            raise
        write_whole(file, json.dumps({"ran_out": str(error).partition("\n")[0]}))
        return EXIT_FAILED
    return EXIT_DONE


def train_some(request: dict[str, Any]) -> dict[str, int]:
    """Trains a few steps with all that a run has on the device, and evaluates a few batches.

    Args:
        request: `recipe`, of `trial_recipe`, and `threads`.

    Returns:
        Bytes of the device: `used` at the peak, by all processes, and `total`.
    """
    import torch

    from trainer.config.recipe import Recipe
    from trainer.data.sampling.plan import evaluation_share
    from trainer.distributed.parallel import joined_world
    from trainer.host.affinity import limits_within, unpin_main_thread
    from trainer.host.allocator import check_allocator
    from trainer.host.limits import read_limits
    from trainer.host.nvml import driver_version
    from trainer.launch.worker import cpu_shares
    from trainer.train.components.loading import choose_loading
    from trainer.train.components.run import build
    from trainer.train.components.task import device_kind, make_task
    from trainer.train.evaluate import evaluate
    from trainer.train.starting_weights import resolve_pretrained
    from trainer.train.step import train_step

    recipe = Recipe.model_validate(request["recipe"])
    kind = device_kind(recipe)
    unpin_main_thread(cpu_shares())
    torch.set_num_threads(request["threads"])
    if kind == "cuda":
        check_allocator(recipe.memory.allocator, os.environ, driver_version)
    recipe, *_ = resolve_pretrained(recipe, None)
    task = make_task(recipe)
    with ExitStack() as stack:
        world = stack.enter_context(joined_world(kind, recipe.parallel.timeout_s))
        limits = limits_within(read_limits(), cpu_shares())
        setting = choose_loading(recipe, task, limits, world.local_size).setting
        run = build(recipe, task, world, setting.workers, prefetch=setting.prefetch)
        stack.callback(run.close)
        batches = run.loader(run.share.batches())
        for step in range(run.plan.steps):
            train_step(run, batches, step)
        whole = run.evaluation_share.plan
        few = min(whole.samples, _EVALUATED * whole.micro_batch_size * world.size)
        share = evaluation_share(few, whole.micro_batch_size, world.rank, world.size)
        with nullcontext() if run.state.average is None else run.state.average.in_place():
            evaluate(run.task, run.state.model, run.evaluation_loader, share, world, recipe.precision)
        return _memory(world.device)


def _memory(device: "torch.device") -> dict[str, int]:
    """Returns the device's memory at the peak, with what CUDA, NCCL and other processes hold."""
    import torch

    if device.type != "cuda":
        return {"used": 0, "total": 1}
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    outside = total - free - torch.cuda.memory_reserved(device)
    return {"used": torch.cuda.max_memory_reserved(device) + outside, "total": total}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
