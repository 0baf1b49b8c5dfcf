"""Evaluation: every sample exactly once, and the same metrics for any number of ranks."""

import math
from contextlib import nullcontext

import torch
from torch import nn

from trainer.config.model import PrecisionConfig
from trainer.config.training import MAIN_SET, EvaluationConfig
from trainer.data.joined import EvaluationLoader
from trainer.data.sampling.plan import Plan, Share
from trainer.distributed.parallel import World, sum_over_ranks
from trainer.distributed.sharding import evaluating
from trainer.errors import BadInputError
from trainer.models.modes import in_evaluation_mode
from trainer.models.precision import autocast
from trainer.observe.phases import enter_phase
from trainer.tasks import Task
from trainer.train.measured import Measured, summarized
from trainer.train.state import Run


def evaluate_run(run: Run) -> tuple[dict[str, float], bool]:
    """Measures a run's weights, or their average if it keeps one, on all evaluation sets; collective.

    Returns:
        The metrics by name, which the run's state gets too; and True if the deciding metric is the best so
        far.

    Raises:
        BadInputError: If the deciding metric is missing.
    """
    state, task = run.state, run.task
    sets = [(MAIN_SET, run.evaluation_loader, run.evaluation_share), *run.evaluation_sets]
    metrics = dict[str, float]()
    with nullcontext() if state.average is None else state.average.in_place():
        for name, loader, share in sets:
            measured = evaluate(task, state.model, loader, share, run.world, run.recipe.precision)
            metrics |= {in_set(name, metric): value for metric, value in measured.items()}
    state.statistics.restore()  # changes that an evaluation made to buffers don't enter the training
    state.metrics = metrics
    decides = in_set(run.recipe.evaluation.decides, task.metric)
    if decides not in metrics:
        raise BadInputError(
            f"the evaluation gave no '{decides}', the metric that decides (it gave {', '.join(metrics)}); "
            "give it each time"
        )
    decisive = metrics[decides]
    score = -decisive if task.lower_is_better else decisive
    best = math.isfinite(score) and (state.best is None or score > state.best[0])
    if best:
        state.best = (score, state.step)
    state.no_better = 0 if best else state.no_better + 1
    return metrics, best


def in_set(name: str, metric: str) -> str:
    """Name of an evaluation set's metric in metrics records."""
    return metric if name == MAIN_SET else f"eval/{name}/{metric}"


def evaluate(
    task: Task,
    model: nn.Module,
    loader: EvaluationLoader,
    share: Share,
    world: World,
    precision: PrecisionConfig,
) -> dict[str, float]:
    """Measures a model on the evaluation data.

    Each rank fills its rows of a table with one row for each micro-batch; all other rows are 0. So the sum of
    the tables over the ranks only adds zeros, and the rows are then added in one order, in float64: the
    metrics are bitwise equal on any number of ranks. A sum that is missing for a micro-batch counts as 0.
    Values for each sample are gathered in the same way, and `task.summarize` computes metrics of them.

    Args:
        task: Measures a batch, and summarizes values of samples.
        model: The bare model; its modules are put back into their modes afterwards.
        loader: Loads the micro-batches of `share`.
        share: This rank's part of the set, from `plan.evaluation_share`.
        world: The ranks.
        precision: Number format of the forward pass.

    Returns:
        Means over the items of the data set (samples, or valid tokens), and what `summarize` returns.

    Raises:
        BadInputError: On all ranks, if their measurements can't be combined or the set has no items.
    """
    micro_batches = share.plan.steps * share.plan.micro_batches
    # Without the micro-batches that pad the last round: their number depends on the number of ranks.
    real = -(-share.plan.samples // share.plan.micro_batch_size)
    measured = Measured(micro_batches, share.plan.micro_batch_size, world.device)
    num_items = [0.0] * micro_batches  # on the host: a copy to the device would make the host wait
    batches = share.batches()
    numbers = share.micro_batches(torch.arange(len(batches)).numpy())
    with in_evaluation_mode(model), evaluating(model), autocast(precision, world.device):
        for number, batch in zip(map(int, numbers), loader(batches), strict=True):
            enter_phase("evaluation")
            num_items[number] = batch.num_items
            given = task.measure(model, batch)
            if number < real:
                measured.take(number, given)
    table = torch.tensor(num_items, dtype=torch.float64, device=world.device)
    count = float(sum_over_ranks(table, world.group)[:real].sum())
    if not count:
        raise BadInputError(
            "the evaluation data has no items (num_items is 0 for all samples): leave such out"
        )
    metrics, rows = dict[str, float](), {}
    for name, table in measured.of_all(world, real).items():
        if table.ndim == 1:
            metrics[name] = float(table[:real].sum()) / count
        else:
            rows[name] = table[:real].flatten(0, 1)[: share.plan.samples].cpu()
    return metrics | summarized(task, rows, world) if rows else metrics


def next_evaluation(config: EvaluationConfig, plan: Plan, done: int) -> int:
    """Returns the first step after `done` after which to evaluate; at the latest the run's last."""
    if config.interval is None:
        return plan.steps
    count, unit = config.interval
    due = plan.next_epoch_end(done, count) if unit == "epoch" else (done // count + 1) * count
    return min(due, plan.steps)


def out_of_patience(run: Run) -> bool:
    """True if the last evaluation.patience evaluations were no better than the best: the run stops early."""
    return 0 < run.recipe.evaluation.patience <= run.state.no_better
