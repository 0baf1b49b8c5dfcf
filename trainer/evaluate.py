"""Evaluation: every sample exactly once, and the same figures for any number of ranks."""

import torch
from torch import nn

from trainer.data.loader import Loader
from trainer.errors import BadInputError
from trainer.parallel import World, sum_over_ranks
from trainer.plan import Share
from trainer.precision import PrecisionConfig, autocast
from trainer.pulse import mark
from trainer.tasks import Task


def evaluate(
    task: Task, model: nn.Module, loader: Loader, share: Share, world: World, precision: PrecisionConfig
) -> dict[str, float]:
    """Measures a model on the evaluation data.

    Each rank fills its rows of one table, a row for each shard, all other rows 0. Summing the tables over
    the ranks adds zeros only, and the rows are then added in one order, in float64: so the figures don't
    depend on the number of ranks, to the last bit.

    Args:
        task: Measures a shard.
        model: The bare model; its mode is restored.
        loader: Loads the shards of `share`.
        share: From `plan.evaluation_share`.
        world: The ranks.
        precision: For autocast.

    Returns:
        Means over the units of the data set: samples, or valid tokens.
    """
    training = model.training
    model.eval()
    shards = share.plan.windows * share.plan.shards
    table: torch.Tensor | None = None
    names: tuple[str, ...] = ()
    batches = share.batches()
    numbers = share.shards(torch.arange(len(batches)).numpy())
    with torch.inference_mode(), autocast(precision, world.device):
        for number, batch in zip(numbers, loader(batches), strict=True):
            mark("evaluation")
            measured = task.measure(model, batch)
            if table is None:
                names = tuple(measured)
                table = torch.zeros(shards, len(names) + 1, dtype=torch.float64, device=world.device)
            table[int(number), -1] = batch.units
            for column, name in enumerate(names):
                table[int(number), column] = measured[name]
    model.train(training)
    if table is None:
        raise BadInputError("the evaluation data set is empty")
    # Without the rows that fill up the last round: how many these are depends on the number of ranks.
    real = -(-share.plan.samples // share.plan.micro_batch)
    *totals, units = sum_over_ranks(table, world.group)[:real].sum(0).tolist()
    return {name: total / units for name, total in zip(names, totals, strict=True)}
