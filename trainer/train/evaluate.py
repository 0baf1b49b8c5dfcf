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
        The metrics, which are also put into its state; and whether those of the set that decides are the
        best so far.
    """
    state, task = run.state, run.task
    sets = [(MAIN_SET, run.evaluation_loader, run.evaluation_share), *run.evaluation_sets]
    metrics = dict[str, float]()
    with nullcontext() if state.average is None else state.average.in_place():
        for name, loader, share in sets:
            found = evaluate(task, state.model, loader, share, run.world, run.recipe.precision)
            metrics |= {in_set(name, metric): value for metric, value in found.items()}
    state.statistics.restore()  # what an evaluation makes of them isn't the training's
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
    """What a metric of an evaluation set is called in rows."""
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

    Each rank fills its rows of one table, a row for each micro-batch, all other rows 0. Summing the tables
    over the ranks adds zeros only, and the rows are then added in one order, in float64: so the metrics don't
    depend on the number of ranks, to the last bit. A sum that some micro-batches don't give counts as 0 of
    these. What is measured as a row for each sample comes together the same way, and `task.summarize` makes
    metrics of it.

    Args:
        model: The bare model; each of its modules has its mode again afterwards.
        loader: Loads the micro-batches of `share`.
        share: From `plan.evaluation_share`.

    Returns:
        Means over the items of the data set: samples, or valid tokens.

    Raises:
        BadInputError: On all ranks, naming what can't be put together.
    """
    micro_batches = share.plan.steps * share.plan.micro_batches
    # Without those that fill up the last round: how many they are depends on the number of ranks.
    real = -(-share.plan.samples // share.plan.micro_batch_size)
    measured = Measured(micro_batches, share.plan.micro_batch_size, world.device)
    num_items = [0.0] * micro_batches  # on the host: a number put into a tensor there would be waited for
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
    """The first step after `done` at which to evaluate; the last one of the run in any case."""
    if config.interval is None:
        return plan.steps
    count, unit = config.interval
    due = plan.next_epoch_end(done, count) if unit == "epoch" else (done // count + 1) * count
    return min(due, plan.steps)


def out_of_patience(run: Run) -> bool:
    """Whether the last evaluations were no better than the best, and the run is to end by that."""
    return 0 < run.recipe.evaluation.patience <= run.state.no_better
