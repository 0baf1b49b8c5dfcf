"""What makes an attempt explain itself: sources of figures, the count of operations, and who judges them."""

from contextlib import ExitStack
from functools import partial

import torch

from trainer.data.images import ImageDataset
from trainer.data.remote import is_url
from trainer.limits import read_limits
from trainer.observe.advice import Advisor, host_clock
from trainer.observe.diagnosis import Facts
from trainer.observe.flops import Count, peak_flops
from trainer.observe.log import Meter
from trainer.observe.machine import Machine
from trainer.parallel import World, gather_rows
from trainer.prepare import count_shapes
from trainer.recipe import Recipe
from trainer.run import Parts


def explain(
    stack: ExitStack, recipe: Recipe, parts: Parts, world: World, local_ranks: int, meter: Meter
) -> Advisor | None:
    """Gives a meter its sources of figures, until the stack is closed; on rank 0 also who judges them."""
    t = parts.training
    meter.units = t.units
    if world.group is not None:
        meter.gather = partial(gather_rows, world)
    if world.rank:
        return None
    machine = Machine(world.device.type == "cuda", local_ranks)
    stack.callback(machine.close)
    meter.sources += [stack.enter_context(host_clock()), parts.loader.take_work, machine.take]
    if parts.compiled:
        meter.count = count_shapes(t.task, recipe.data.micro_batch)
    else:
        samples = t.accumulation * recipe.data.micro_batch
        meter.count = Count(samples, recomputes=recipe.memory.checkpointing != "none")
    if world.device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(world.device), recipe.precision.mode)
        meter.peak = None if peak is None else peak * world.size
    images = t.task.train_data
    facts = Facts(
        on_gpu=world.device.type == "cuda",
        ranks=world.size,
        local_ranks=local_ranks,
        threads=torch.get_num_threads(),
        cpus=read_limits().cpus,
        window_samples=recipe.data.global_batch,
        micro_batch=recipe.data.micro_batch,
        remote=is_url(str(recipe.data.path)),
        decodes=isinstance(images, ImageDataset) and not images.records.raw,
    )
    advisor = Advisor(facts, meter.count, meter.emit, recipe.log.price_per_hour)
    meter.sinks.append(advisor)
    return advisor
