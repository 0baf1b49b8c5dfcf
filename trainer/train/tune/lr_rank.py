"""A rank of a learning-rate range test: `trainer.train.tune.lr_rank FOLDER-OF-THE-LAUNCH`."""

import json
import math
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import EXIT_DONE, EXIT_REQUEUE
from trainer.host.files import write_whole
from trainer.launch.worker import Worker

if TYPE_CHECKING:
    from trainer.train.state import Run


def main(request: dict[str, Any]) -> int:
    """Does a rank's part; rank 0 leaves what it saw."""
    import torch  # after the signals have a handler

    from trainer.config.recipe import Recipe
    from trainer.distributed.parallel import joined_world
    from trainer.host.affinity import unpin_main_thread, within
    from trainer.host.limits import read_limits
    from trainer.launch.worker import cpu_shares
    from trainer.train.allocator import set_up_allocator
    from trainer.train.build import build
    from trainer.train.loading import choose_loading
    from trainer.train.outputs import memory_explained
    from trainer.train.run import device_kind, make_task
    from trainer.train.tune.lr_range import RESULT

    recipe = Recipe.model_validate(request["recipe"])
    kind = device_kind(recipe)
    unpin_main_thread(cpu_shares())
    torch.set_num_threads(request["threads"])
    if kind == "cuda":
        set_up_allocator(recipe.memory.allocator, os.environ)
    task = make_task(recipe)
    with ExitStack() as stack:
        world = stack.enter_context(joined_world(kind, recipe.parallel.timeout_s))
        limits, local = within(read_limits(), cpu_shares()), int(os.environ["LOCAL_WORLD_SIZE"])
        setting = choose_loading(recipe, task, limits, local).setting
        run = build(recipe, task, world, setting.workers, prefetch=setting.prefetch)
        stack.callback(run.close)
        with memory_explained(run, None):
            told = losses_of(run, request["rates"])
        if told is None:
            return EXIT_REQUEUE
        if world.rank == 0:
            # JSON has no word for what isn't finite.
            pairs = [(lr, loss if math.isfinite(loss) else "nan") for lr, loss in told]
            write_whole(Path(request["folder"], RESULT), json.dumps(pairs))
    return EXIT_DONE


def losses_of(run: "Run", rates: Sequence[float]) -> list[tuple[float, float]] | None:
    """The learning rate and the loss of each step, over all ranks; until it diverges. None: after a signal.

    Each loss is waited for: all ranks see the same one, and end after the same step.
    """
    from trainer.distributed.parallel import sum_over_ranks
    from trainer.launch.worker import requested
    from trainer.optim.optimizers import LRScheduler
    from trainer.train.step import train_step
    from trainer.train.tune.lr_range import has_diverged

    state, told = run.state, list[tuple[float, float]]()
    assert isinstance(state.lr, LRScheduler)
    state.lr.follow(list(rates))
    batches = run.loader(run.share.batches())
    for step in range(len(rates)):
        if requested():
            return None
        train_step(run, batches, step)
        loss = float(sum_over_ranks(state.loss.clone(), run.reduction.loss_group).view(-1)[0])
        state.loss.zero_()
        told.append((float(state.lr.of_last_update()), loss))
        if has_diverged([loss for _, loss in told]):
            break
    return told


if __name__ == "__main__":
    with Worker(sys.argv[1]) as worker:
        worker.code = main(worker.request)
    sys.exit(worker.exit_code)
