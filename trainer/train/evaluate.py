"""Evaluation: every sample exactly once, and the same metrics for any number of ranks."""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import distributed as dist, nn

from trainer.config.model import PrecisionConfig
from trainer.config.training import MAIN_SET, EvaluationConfig
from trainer.data.loader import Loader
from trainer.data.sampling.plan import Plan, Share
from trainer.distributed.parallel import World, sum_over_ranks, words_of_ranks
from trainer.distributed.sharding import evaluating, gathered
from trainer.errors import BadInputError
from trainer.models.modes import in_evaluation_mode
from trainer.models.precision import autocast
from trainer.observe.console import warn
from trainer.observe.phases import enter_phase
from trainer.observe.rows import why_no_metric
from trainer.tasks import Summarizing, Task
from trainer.tasks.values import as_tensor, describe_value, why_unfit
from trainer.train.state import Run

_COUNTS = "\0counts"  # after a figure's name: the table of what it counts


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


@contextmanager
def in_evaluation(run: Run) -> Iterator[None]:
    """A context in which a run's model is as an evaluation has it: averaged weights, evaluation mode."""
    state = run.state
    with (
        nullcontext() if state.average is None else state.average.in_place(),
        in_evaluation_mode(state.model),
        evaluating(state.model),
        autocast(run.recipe.precision, run.world.device),
    ):
        yield


@contextmanager
def shown_to_hooks(run: Run) -> Iterator[None]:
    """A context in which hooks of any rank may call a run's model; collective if it is sharded."""
    with in_evaluation(run), gathered(run.state.model):
        yield
    run.state.statistics.restore()


def in_set(name: str, metric: str) -> str:
    """Name of an evaluation set's metric in metrics records."""
    return metric if name == MAIN_SET else f"eval/{name}/{metric}"


def evaluate(
    task: Task,
    model: nn.Module,
    loader: Loader,
    share: Share,
    world: World,
    precision: PrecisionConfig,
) -> dict[str, float]:
    """Measures a model on the evaluation data.

    Each rank fills its rows of a table with one row for each micro-batch; all other rows are 0. So the sum of
    the tables over the ranks only adds zeros, and the rows are then added in one order, in float64: the
    metrics are bitwise equal on any number of ranks. A sum that is missing for a micro-batch counts as 0.
    Values for each sample are gathered in the same way, and `task.summarize` computes metrics of them. What a
    figure of a custom task counts is a table beside its own.

    Args:
        task: Measures a batch, and summarizes values of samples.
        model: The bare model; its modules are put back into their modes afterwards.
        loader: Loads the micro-batches of `share`.
        share: This rank's part of the set, from `plan.evaluation_share`.
        world: The ranks.
        precision: Number format of the forward pass.

    Returns:
        Means over the items of the data set (samples, or valid tokens), or over what a figure counts; and
        what `summarize` returns.

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
            try:
                given = task.measure(model, batch)
            except BadInputError as error:
                measured.fail(error)
                continue
            if number < real:
                measured.take(number, given)
    table = torch.tensor(num_items, dtype=torch.float64, device=world.device)
    count = float(sum_over_ranks(table, world.group)[:real].sum())
    if not count:
        raise BadInputError(
            "the evaluation data has no items (num_items is 0 for all samples): leave such out"
        )
    metrics, rows = dict[str, float](), dict[str, Any]()
    tables = measured.of_all(world, real)
    for name, table in tables.items():
        if name.endswith(_COUNTS):
            continue
        pair = [one[:real] for one in (table, tables.get(name + _COUNTS)) if one is not None]
        if table.ndim == 1:
            total, own = float(pair[0].sum()), float(pair[1].sum()) if pair[1:] else count
            if not own:
                raise BadInputError(f"measure gave '{name}' with counts of 0 alone: nothing counts in it")
            metrics[name] = total / own
        else:
            one, *counts = (one.flatten(0, 1)[: share.plan.samples].cpu() for one in pair)
            rows[name] = (one, *counts) if counts else one
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


class _Layout(NamedTuple):
    """Layout of a table: dtype and shape of a micro-batch's value, and how many micro-batches gave one."""

    dtype: str
    shape: list[int]
    micro_batches: int


@dataclass
class _Table:
    values: torch.Tensor
    micro_batches: int = 0

    def layout(self) -> _Layout:
        kind, shape = str(self.values.dtype).removeprefix("torch."), [*self.values.shape[1:]]
        return _Layout(kind, shape, self.micro_batches)


class Measured:
    """Tables by name with a row for each micro-batch of the evaluation set; rows of other ranks are 0.

    Faults are raised after the last micro-batch, as the other ranks would wait for this one.
    """

    def __init__(self, micro_batches: int, size: int, device: torch.device) -> None:
        """Takes the number of micro-batches over all ranks, and their size in samples."""
        self._micro_batches, self._size, self._device = micro_batches, size, device
        self._tables: dict[str, _Table] = {}
        self._fault = ""

    def fail(self, error: BadInputError) -> None:
        """Keeps a fault."""
        self._fault = self._fault or str(error)

    def take(self, number: int, given: Any) -> None:
        """Keeps the values of a micro-batch: sums as float64, values of samples in their own dtype."""
        try:
            if not isinstance(given, Mapping):
                raise BadInputError(
                    f"measure gave {describe_value(given)} for a batch; it gives a dict of tensors"
                )
            for name, value in given.items():
                one, *counts = value if isinstance(value, tuple) else (value,)
                one = as_tensor(one)
                if unfit := why_unfit(name, one, self._size):
                    raise BadInputError(f"measure gave {unfit}")
                self._put(number, name, one)
                for count in counts:
                    self._put(number, name + _COUNTS, as_tensor(count))
        except BadInputError as error:
            self.fail(error)

    def _put(self, number: int, name: str, value: torch.Tensor) -> None:
        kind = value.dtype if value.ndim else torch.float64
        table = self._tables.get(name)
        if table is None:
            place = torch.zeros((self._micro_batches, *value.shape), dtype=kind, device=self._device)
            table = self._tables[name] = _Table(place)
        if table.values.shape[1:] != value.shape or table.values.dtype != kind:
            raise _unlike(name, table.layout(), _Layout(str(kind).removeprefix("torch."), [*value.shape], 0))
        row = table.values[number]
        row.copy_(value) if value.ndim else row.fill_(value)  # without a host synchronization
        table.micro_batches += 1

    def of_all(self, world: World, count: int) -> dict[str, torch.Tensor]:
        """Returns the tables summed over all ranks, by name; collective.

        Ranks may have different names, in any order: each goes through the names of all ranks.

        Args:
            world: The ranks.
            count: Micro-batches of all ranks.

        Raises:
            BadInputError: On all ranks, if a rank had a fault, layouts differ, or rows are missing.
        """
        own = {"fault": self._fault, "tables": {name: one.layout() for name, one in self._tables.items()}}
        ranks = [json.loads(word) for word in words_of_ranks(json.dumps(own), world)]
        if fault := next((rank["fault"] for rank in ranks if rank["fault"]), ""):
            raise BadInputError(fault)
        all_layouts: dict[str, list[_Layout]] = {}
        for rank in ranks:
            for name, layout in rank["tables"].items():
                all_layouts.setdefault(name, []).append(_Layout(*layout))
        if not all_layouts:
            raise BadInputError("measure gave nothing for any batch; it gives a dict of tensors")
        tables = {}
        for name, layouts in all_layouts.items():
            first, given = layouts[0], sum(layout.micro_batches for layout in layouts)
            for other in layouts[1:]:
                if other[:2] != first[:2]:
                    raise _unlike(name, first, other)
            if first.shape and given < count:
                raise BadInputError(
                    f"measure gave rows '{name.removesuffix(_COUNTS)}' for {given} of {count} batches; every "
                    "sample has its row"
                )
            if name in self._tables:
                values = self._tables[name].values
            else:
                shape = (self._micro_batches, *first.shape)
                values = torch.zeros(shape, dtype=getattr(torch, first.dtype), device=self._device)
            tables[name] = _joined(values, world.group)
        return tables


def summarized(task: Task, rows: Mapping[str, Any], world: World) -> dict[str, float]:
    """Returns the metrics that `summarize` of the task computes on rank 0, on all ranks; collective.

    Args:
        task: A task with a method `summarize`.
        rows: Values of all samples by name, each (samples, …), or such a pair of values and counts.
        world: The ranks.

    Raises:
        BadInputError: On all ranks, if `summarize` fails on one.
    """
    if not hasattr(task, "summarize"):
        raise BadInputError(f"measure gave rows '{next(iter(rows))}', and the task has no method summarize")
    metrics, fault = dict[str, float](), ""
    try:
        for name, value in cast(Summarizing, task).summarize(rows).items():
            if why := why_no_metric(name):
                warn(f"summarize gave {name!r:.80}, which {why}; it is left out")
            else:
                metrics[name] = float(value)
    except BadInputError as error:
        if world.group is None:
            raise
        fault = str(error)
    ranks = [json.loads(word) for word in words_of_ranks(json.dumps([fault, metrics]), world)]
    if fault := next((fault for fault, _ in ranks if fault), ""):
        raise BadInputError(fault)
    first: dict[str, float] = ranks[0][1]
    return first


def _unlike(name: str, first: _Layout, other: _Layout) -> BadInputError:
    kinds = []
    for kind, shape, _ in (first, other):
        each = f"({', '.join(('n', *map(str, shape[1:])))}{',' if len(shape) == 1 else ''})"
        kinds.append(f"rows {each} of {kind}" if shape else "a sum ()")
    return BadInputError(
        f"measure gave '{name}' as {kinds[0]} for one batch and as {kinds[1]} for another; give one shape "
        "and type, whatever is in the batch"
    )


def _joined(table: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sums a table over the ranks, in place, where each row is 0 on all ranks but one.

    The bytes are summed, so that every dtype stays the same to the last bit, also bool and -0.0.
    """
    if table.numel():
        sum_over_ranks(table.view(-1).view(torch.uint8), group)
    return table
