"""Evaluation: every sample exactly once, and the same metrics for any number of ranks."""

from typing import cast

import torch
from torch import nn

from trainer.config.model import PrecisionConfig
from trainer.data.loader import Loader
from trainer.data.sampling.plan import Share
from trainer.distributed.parallel import World, sum_over_ranks
from trainer.errors import BadInputError
from trainer.models.precision import autocast
from trainer.observe.phases import enter_phase
from trainer.tasks import Summarising, Task


def evaluate(
    task: Task, model: nn.Module, loader: Loader, share: Share, world: World, precision: PrecisionConfig
) -> dict[str, float]:
    """Measures a model on the evaluation data.

    Each rank fills its rows of one table, a row for each micro-batch, all other rows 0. Summing the tables
    over the ranks adds zeros only, and the rows are then added in one order, in float64: so the metrics don't
    depend on the number of ranks, to the last bit. What is measured as a row for each sample comes together
    the same way, and `task.summarise` makes metrics of it.

    Args:
        task: Measures a micro-batch.
        model: The bare model; its mode is restored.
        loader: Loads the micro-batches of `share`.
        share: From `plan.evaluation_share`.
        world: The ranks.
        precision: For autocast.

    Returns:
        Means over the items of the data set: samples, or valid tokens.
    """
    training = model.training
    model.eval()
    micro_batches = share.plan.steps * share.plan.micro_batches
    tables: dict[str, torch.Tensor] = {}
    num_items = torch.zeros(micro_batches, dtype=torch.float64, device=world.device)
    batches = share.batches()
    numbers = share.micro_batches(torch.arange(len(batches)).numpy())
    with torch.inference_mode(), autocast(precision, world.device):
        for number, batch in zip(numbers, loader(batches), strict=True):
            enter_phase("evaluation")
            num_items[int(number)] = batch.num_items
            for name, value in task.measure(model, batch).items():
                if name not in tables:
                    kind = torch.uint8 if value.dtype == torch.bool else value.dtype  # gloo adds no bool
                    kind = kind if value.ndim else torch.float64
                    tables[name] = torch.zeros((micro_batches, *value.shape), dtype=kind, device=world.device)
                tables[name][int(number)] = value
    model.train(training)
    if not tables:
        raise BadInputError("the evaluation data set is empty")
    # Without the rows that fill up the last round: how many these are depends on the number of ranks.
    real = -(-share.plan.samples // share.plan.micro_batch_size)
    count = float(sum_over_ranks(num_items, world.group)[:real].sum())
    metrics, rows = {}, {}
    for name, table in tables.items():
        together = sum_over_ranks(table, world.group)[:real]
        if table.ndim == 1:
            metrics[name] = float(together.sum()) / count
        else:
            rows[name] = together.flatten(0, 1)[: share.plan.samples].cpu()
    if rows:
        metrics |= cast(Summarising, task).summarise(rows)
    return metrics
