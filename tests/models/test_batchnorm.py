"""Promise: BatchNorm's statistics are torch's, however often a forward pass calls a layer."""

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers.steps import ALONE, assert_same_bits
from tests.helpers.toys import TokenTask, make_recipe, run_steps
from tests.helpers.world import Ranks
from trainer.distributed.parallel import World
from trainer.models.batchnorm import StepStatistics
from trainer.train.components.run import build
from trainer.train.state import Run

pytestmark = pytest.mark.compat
F64 = torch.float64


class Model(nn.Module):
    """Calls its BatchNorm layers in a way that the kind names."""

    def __init__(self, kind: str, momentum: float | None) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.last = nn.Linear(15, 6), nn.Linear(6, 1)
        self.norm: nn.Module = nn.BatchNorm1d(6, momentum=momentum)
        self.block = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.ReLU()))
        self.other = nn.BatchNorm1d(6, momentum=momentum)
        if kind == "two names":
            self.other = self.norm
        if kind == "one buffer":  # of two layers, which have scales of their own
            self.other.running_mean = self.norm.running_mean
            self.other.running_var = self.norm.running_var

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        h = self.first(x)
        match self.kind:
            case "recurrent":
                for _ in range(3):
                    h = self.block(self.norm(h)).tanh()
            case "views" | "two names":
                h = self.norm(h) + self.other(self.first(x + 10))
            case "one buffer":
                h = self.norm(h)
                if float(x.sum()) > 0:
                    h = h + self.other(self.first(x + 10))
            case "sometimes":
                h = self.norm(h)
                if float(x.sum()) > 0:
                    h = h + self.norm(h + 1) + self.other(h)
            case "teacher":
                with torch.no_grad():
                    aim = self.norm(self.first(x - 3))
                h = self.norm(h) - aim
            case "in evaluation":
                self.other.eval()
                h = self.other(self.norm(h))
            case _:
                h = self.block(self.norm(h))
        result: torch.Tensor = self.last(h)
        return result


class Task(TokenTask):
    """A model of a kind on 32 samples."""

    def __init__(self, kind: str, momentum: float | None = 0.1, dtype: torch.dtype = F64) -> None:
        super().__init__(32, ragged=False, dtype=dtype)
        self.kind, self.momentum = kind, momentum

    def model(self) -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)  # `to` would give each name a tensor of its own
        try:
            return Model(self.kind, self.momentum)
        finally:
            torch.set_default_dtype(before)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x = batch.fields["x"].to(self.dtype)
        result: torch.Tensor = model(x).square()
        if self.kind == "critic":
            result = result - 0.1 * model(x.flip(0) + 2)
        return result.sum()

    def measure(self, model: nn.Module, batch: Any) -> Any:
        return {"loss": self.loss(model, batch)}


KINDS = ("once", "views", "two names", "one buffer", "recurrent", "sometimes", "teacher", "critic")


def built(task: Task, micro: int = 8, world: World = ALONE, **sections: Any) -> Run:
    data = {"global_batch_size": 8, "micro_batch_size": micro}
    # The rates lie on the device as float32, which holds this one exactly.
    rate = {"lr": 2**-10, "schedule": "constant", "warmup_steps": 0}
    optim = {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0, **rate}
    return build(make_recipe(epochs=2, data=data, optim=optim, **sections), task, world, 0)


def trained(run: Run) -> dict[str, torch.Tensor]:
    run_steps(run, 8)
    run.close()
    return run.state.model.state_dict()


def by_hand(task: Task, run: Run) -> dict[str, torch.Tensor]:
    """A plain loop over the same samples; micro-batches start from the statistics before the step."""
    model = task.model()
    model.load_state_dict(run.state.model.state_dict())
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=float(run.recipe.optim.lr))
    for step in range(8):
        micro_batches = run.plan.read(step * run.micro_batches + np.arange(run.micro_batches)).sample
        before = copy.deepcopy(dict(model.named_buffers()))
        made: dict[str, list[torch.Tensor]] = {name: [] for name in before}
        for samples in micro_batches:
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
            batch = SimpleNamespace(fields={name: array[samples] for name, array in task.arrays.items()})
            (task.loss(model, batch) / run.items.begin(step)).backward()
            for name, buffer in model.named_buffers():
                counter = f"{name.rpartition('.')[0]}.num_batches_tracked"
                if int(model.get_buffer(counter)) > int(before[counter]):
                    made[name].append(buffer.clone())
        for name, buffer in model.named_buffers():
            mean = torch.stack(made[name] or [before[name]]).double().mean(0)
            buffer.copy_(mean if buffer.is_floating_point() else mean.round())
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def assert_near(ours: Any, theirs: Any, within: float = 1e-12) -> None:
    torch.testing.assert_close(ours, theirs, rtol=within, atol=within)


@pytest.mark.parametrize("kind", [*KINDS, "in evaluation"])
def test_without_accumulation_they_are_those_of_a_plain_loop(kind: str) -> None:
    task = Task(kind, None if kind in ("recurrent", "once") else 0.1)
    run = built(task)
    right = by_hand(task, run)
    assert_near(trained(run), right)
    calls = {"recurrent": 3, "two names": 2, "teacher": 2, "critic": 2}.get(kind)
    if calls is not None:
        assert int(right["norm.num_batches_tracked"]) == 8 * calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_torchs_to_the_bit(dtype: torch.dtype) -> None:
    layer, theirs = nn.BatchNorm1d(5).to(dtype), nn.BatchNorm1d(5).to(dtype)
    statistics = StepStatistics(layer, None)
    for step in range(5):
        torch.manual_seed(step)
        for one in (torch.randn(16, 5, dtype=dtype), torch.randn(4, 5, dtype=dtype) + 3):
            layer(one), theirs(one)
        statistics.add(statistics.of_micro_batch())
        layer(torch.full((2, 5), 99.0, dtype=dtype))  # what backward computes again doesn't count
        statistics.end_step()
    assert_same_bits(layer.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("kind", ["once", "views", "recurrent", "sometimes", "critic"])
def test_with_accumulation_each_micro_batch_starts_from_the_same(kind: str) -> None:
    task = Task(kind, None if kind == "recurrent" else 0.3)
    run = built(task, micro=2)
    right = by_hand(task, run)
    assert_near(trained(run), right)


def on_rank(world: World, kind: str, reduction: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    parallel = {"threads": 1, "reduction": reduction, "find_unused_parameters": reduction == "all_reduce"}
    return trained(built(Task(kind, 0.1), 2, world, parallel=parallel))


def test_ranks_may_share_the_micro_batches_as_they_like(ranks: Ranks) -> None:
    alone, tree = (on_rank(ALONE, "sometimes", how) for how in ("all_reduce", "tree"))
    assert_same_bits(ranks.run(2, on_rank, "sometimes", "tree"), [tree] * 2)
    assert_near([*ranks.run(2, on_rank, "sometimes", "all_reduce"), tree], [alone] * 3)


def test_a_skipped_step_leaves_them_and_a_momentum_may_change() -> None:
    layer, theirs = nn.BatchNorm1d(2, dtype=F64), nn.BatchNorm1d(2, dtype=F64)
    statistics = StepStatistics(layer, None)
    for step, momentum in enumerate((0.1, 0.5, 0.9)):
        layer.momentum = theirs.momentum = momentum
        data = torch.randn(8, 2, dtype=F64)
        for one in (layer, theirs) if step != 1 else (layer,):
            one(data), one(data + 1)
        statistics.add(statistics.of_micro_batch())
        statistics.end_step(torch.tensor(float(step == 1)))
    assert_near(layer.state_dict(), theirs.state_dict())


@pytest.mark.parametrize(
    "sections",
    [
        {"memory": {"checkpointing": "names", "names": ["norm", "first"]}},
        {"parallel": {"threads": 1, "reduction": "tree"}},
        {"anomaly": {"nonfinite": "skip"}},
    ],
    ids=lambda sections: next(iter(sections)),
)
@pytest.mark.parametrize("kind", ["recurrent", "sometimes"])
def test_no_option_counts_a_call_twice(kind: str, sections: dict[str, Any]) -> None:
    states = [trained(built(Task(kind), 4, **more)) for more in ({}, sections)]
    assert_near(states[1], states[0])


def synchronized(world: World) -> dict[str, torch.Tensor]:
    parallel = {"threads": 1, "sync_batchnorm": True, "find_unused_parameters": True}
    return trained(built(Task("recurrent"), 4, world, parallel=parallel))


def test_synchronized_layers_count_each_call_too(ranks: Ranks) -> None:
    assert_near(ranks.run(2, synchronized), [trained(built(Task("recurrent"), 8))] * 2, 1e-9)
