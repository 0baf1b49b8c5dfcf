"""Tables of the values that a task's `measure` returns, combined over all ranks and checked on each."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import distributed as dist

from trainer.distributed.parallel import World, sum_over_ranks, words_of_ranks
from trainer.errors import BadInputError
from trainer.observe.console import warn
from trainer.observe.rows import why_no_metric
from trainer.tasks import Summarizing, Task
from trainer.tasks.figures import as_tensor, describe_value, why_unfit


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

    def take(self, number: int, given: Any) -> None:
        """Keeps the values of a micro-batch: sums as float64, values of samples in their own dtype."""
        try:
            if not isinstance(given, Mapping):
                raise BadInputError(
                    f"measure gave {describe_value(given)} for a batch; it gives a dict of tensors"
                )
            for name, value in given.items():
                self._put(number, name, value)
        except BadInputError as error:
            self._fault = self._fault or str(error)

    def _put(self, number: int, name: Any, value: Any) -> None:
        value = as_tensor(value)
        if unfit := why_unfit(name, value, self._size):
            raise BadInputError(f"measure gave {unfit}")
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
                    f"measure gave rows '{name}' for {given} of {count} batches; every sample has its row"
                )
            if name in self._tables:
                values = self._tables[name].values
            else:
                shape = (self._micro_batches, *first.shape)
                values = torch.zeros(shape, dtype=getattr(torch, first.dtype), device=self._device)
            tables[name] = _joined(values, world.group)
        return tables


def summarized(task: Task, rows: Mapping[str, torch.Tensor], world: World) -> dict[str, float]:
    """Returns the metrics that `summarize` of the task computes on rank 0, on all ranks; collective.

    Args:
        task: A task with a method `summarize`.
        rows: Values of all samples by name, each (samples, …).
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
