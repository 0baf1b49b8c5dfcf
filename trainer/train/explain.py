"""What makes an attempt explain itself: sources of metrics, the count of operations, and who judges them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch

from trainer.config.data import is_url
from trainer.config.recipe import Recipe
from trainer.data.formats.images import ImageDataset
from trainer.distributed.parallel import World, gather_rows
from trainer.errors import OutOfMemory
from trainer.host.limits import read_limits
from trainer.observe.advice import Advisor, host_clock
from trainer.observe.diagnosis import Facts
from trainer.observe.flops import peak_flops
from trainer.observe.leak import Growth, Trends
from trainer.observe.log import MetricLogger
from trainer.observe.machine import Machine
from trainer.observe.memory import memory_source, start_history
from trainer.observe.oom import explain_oom, held_by, is_out_of_memory
from trainer.observe.profile import Kind, Profile
from trainer.train.operations import count_operations
from trainer.train.run import Parts

_PAUSE_S = 0.25  # where rows come more often than that, they explain themselves now and then


def explain(
    stack: ExitStack, recipe: Recipe, parts: Parts, world: World, local_ranks: int, logger: MetricLogger
) -> Advisor | None:
    """Gives a logger its sources of metrics, until the stack is closed; on rank 0 also who judges them."""
    t = parts.training
    logger.num_items, logger.pause_s = t.num_items, _PAUSE_S
    if world.group is not None:
        logger.gather = partial(gather_rows, world)
    if world.rank:
        return None
    start_history(recipe.memory, world.device)
    machine = Machine(world.device.type == "cuda", local_ranks)
    stack.callback(machine.close)
    logger.sources += [stack.enter_context(host_clock()), parts.loader.take_work, machine.take]
    logger.sources.append(memory_source(world.device))
    logger.count = count_operations(t.task, t.model, recipe.data.micro_batch_size, world.device)
    if world.device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(world.device), recipe.precision.mode)
        logger.peak = None if peak is None else peak * world.size
    images, limits = t.task.train_data, read_limits()
    facts = Facts(
        on_gpu=world.device.type == "cuda",
        ranks=world.size,
        local_ranks=local_ranks,
        threads=torch.get_num_threads(),
        cpus=limits.cpus,
        memory_bytes=limits.memory_bytes or None,
        step_samples=recipe.data.global_batch_size,
        micro_batch_size=recipe.data.micro_batch_size,
        remote=is_url(str(recipe.data.path)),
        decodes=isinstance(images, ImageDataset) and not images.records.raw,
    )
    growth = None
    if recipe.log.tracemalloc:
        growth = Growth()
        stack.callback(growth.close)
    advisor = Advisor(facts, logger.count, logger.emit, recipe.log.price_per_hour, Trends(growth))
    logger.sinks.append(advisor)
    return advisor


@contextmanager
def memory_explained(recipe: Recipe, parts: Parts, world: World, folder: Path | None) -> Iterator[None]:
    """Says who holds the memory when it runs out.

    Raises:
        OutOfMemory: In place of torch's error, or Python's.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        t = parts.training
        average = t.average.tensors.values() if t.average is not None else ()
        text = explain_oom(
            error,
            world.device,
            folder,
            held_by(t.model, t.optimizer, average=average),
            micro_batch_size=recipe.data.micro_batch_size,
            checkpointing=recipe.memory.checkpointing,
            precision=recipe.precision.mode,
        )
        raise OutOfMemory(text) from error


def profiled(
    stack: ExitStack, kind: Kind | None, folder: Path, recipe: Recipe, parts: Parts, device: torch.device
) -> Profile | None:
    """What looks at some steps, until the stack is closed at the latest."""
    if kind is None:
        return None
    skip = recipe.compile.warm_up + 4
    profile = Profile(folder, parts.training.model, device, kind=kind, skip=skip, modules=not parts.compiled)
    stack.callback(profile.close)
    return profile
