"""Promise: a model's own statistics get one update a step, on any number of ranks, and go on exactly."""

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.helpers.ports import free_port
from tests.helpers.refusals import named
from tests.helpers.steps import State, assert_same_bits
from tests.helpers.toys import TokenTask, build_alone, make_recipe
from tests.helpers.world import Ranks
from trainer.distributed.parallel import World, joined_world
from trainer.errors import BadInputError
from trainer.launch.worker import Worker
from trainer.train.components.run import build
from trainer.train.state import Run, load_tensors, tensors_of
from trainer.train.step import train_step

F64 = torch.float64


class Keeping(nn.Module):
    """Keeps statistics of its own, in ways that the kind names."""

    mean: torch.Tensor
    seen: torch.Tensor

    def __init__(self, kind: str = "all") -> None:
        super().__init__()
        self.kind = kind
        self.linear: nn.Module = nn.Linear(3, 4, dtype=F64)
        self.norm: nn.Module = nn.Identity()
        if kind == "all":
            self.linear = nn.utils.parametrizations.spectral_norm(self.linear)
            self.norm = nn.InstanceNorm1d(5, track_running_stats=True, dtype=F64)
        elif kind == "own batchnorm":
            self.norm = OwnBatchNorm(5, dtype=F64)
        elif kind == "frozen":
            self.norm = Frozen(5, dtype=F64)
        start = None if kind == "made later" else torch.zeros(3, dtype=F64)
        if kind == "complex":
            start = torch.zeros(3, dtype=torch.complex64)
        self.register_buffer("mean", start, persistent=kind != "forgotten")
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            now = x.detach().mean((0, 1))
            match self.kind:
                case "complex":
                    self.mean.lerp_(torch.complex(now, now.square()).to(self.mean.dtype), 0.1)
                case "reshaped" | "forgotten":
                    self.mean = x.detach().flatten()
                case "made later":
                    self.mean = now
                case "frozen" | "own batchnorm":
                    pass
                case _:
                    self.mean = 0.9 * self.mean + 0.1 * now
            self.seen += 1
        x = self.norm(x)
        shift = self.mean.abs() if self.kind in ("all", "complex") else 0.0
        result: torch.Tensor = self.linear(x - shift)
        return result


class OwnBatchNorm(nn.BatchNorm1d):
    """Counts no batches."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        statistics = (self.running_mean, self.running_var)
        return F.batch_norm(x, *statistics, self.weight, self.bias, self.training, 0.2)


class Frozen(nn.BatchNorm1d):
    """Keeps its statistics in training, too."""

    def train(self, _: bool = True) -> "Frozen":
        super().train(False)
        return self


class Task(TokenTask):
    """Has a model of a kind; tells how many samples its loss was given."""

    sizes: list[int] = []  # noqa: RUF012

    def __init__(self, kind: str = "all") -> None:
        super().__init__(32, ragged=False)
        self.kind = kind

    def model(self) -> nn.Module:
        return Keeping(self.kind)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.sizes.append(len(batch.fields["x"]))
        return super().loss(model, batch)


def built(world: World, task: TokenTask, reduction: str = "all_reduce", **parallel: Any) -> Run:
    recipe = make_recipe(
        epochs=2,
        data={"global_batch_size": 8, "micro_batch_size": 2},
        optim={"lr": 0.01, "weight_decay": 0.1},
        ema={"decay": 0.9},
        parallel={"threads": 1, "reduction": reduction, **parallel},
    )
    return build(recipe, task, world, workers=0)


def train(world: World, task: TokenTask, steps: range, state: State | None, *how: Any, **more: Any) -> State:
    """Trains some steps of a run, from a saved state; gives the state after them."""
    run = built(world, task, *how, **more)
    if state is not None:
        load_tensors(run.state, steps.start, state)
    run.replica.train()
    batches = run.loader(run.share.batches(steps.start))
    for step in steps:
        train_step(run, batches, step)
    kinds = tensors_of(run.state).items()
    return {kind: {name: tensor.detach().clone() for name, tensor in part.items()} for kind, part in kinds}


def train_kind(world: World, kind: str, steps: range, state: State | None, *how: Any) -> State:
    return train(world, Task(kind), steps, state, *how)


@pytest.mark.parametrize(
    ("kind", "reduction"),
    [
        ("all", "all_reduce"),
        ("all", "tree"),
        ("complex", "tree"),
        ("own batchnorm", "all_reduce"),
        ("frozen", "all_reduce"),
    ],
)
def test_a_run_on_two_ranks_goes_on_exactly(ranks: Ranks, kind: str, reduction: str) -> None:
    """Each rank from the first one's state, as a checkpoint holds it."""
    whole = ranks.run(2, train_kind, kind, range(5), None, reduction)
    begun = ranks.run(2, train_kind, kind, range(2), None, reduction)
    for state in ranks.run(2, train_kind, kind, range(2, 5), begun[0], reduction):
        assert_same_bits(whole[0], state)
    for state in (whole[1], begun[1]):
        assert_same_bits(whole[0] if state is whole[1] else begun[0], state)
    for size in (1, 4):
        for state in ranks.run(size, train_kind, kind, range(5), None, reduction):
            for name, tensor in state["model"].items():
                assert torch.allclose(tensor, whole[0]["model"][name], rtol=1e-5), name
            if reduction == "tree":
                assert_same_bits(whole[0], state)
    assert int(whole[0]["model"]["seen"]) == 5
    if kind in ("all", "complex"):
        assert float(whole[0]["model"]["mean"].abs().min()) > 0
    if kind == "complex":
        assert float(whole[0]["model"]["mean"].imag.min()) > 0
    if kind == "own batchnorm":
        assert float(whole[0]["model"]["norm.running_mean"].abs().min()) > 0
    if kind == "frozen":
        assert not whole[0]["model"]["norm.running_mean"].any()


def test_statistics_of_ones_own_are_those_of_torch() -> None:
    """One update a step of one micro-batch: what the model itself would do."""
    recipe = make_recipe(data={"global_batch_size": 8, "micro_batch_size": 8}, optim={"lr": 1e-9})
    for kind in ("complex", "own batchnorm", "own"):
        run = build_alone(recipe, Task(kind))
        alone = Keeping(kind).train()
        batches = list(zip(range(4), run.loader(run.share.batches()), strict=False))
        for step, batch in batches:
            train_step(run, iter([batch]), step)
            alone(batch.fields["x"])
        for name, buffer in alone.named_buffers():
            assert torch.allclose(run.state.model.get_buffer(name), buffer, rtol=1e-6), (kind, name)


def told(world: World, kind: str) -> tuple[str, str]:
    """What is refused, or what is said."""
    try:
        return "", "\n".join(built(world, Task(kind)).notes)
    except BadInputError as error:
        return str(error), ""


def test_what_no_checkpoint_could_hold_is_refused_before_training(ranks: Ranks) -> None:
    for kind in ("reshaped", "made later"):
        for refused, _ in ranks.run(2, told, kind):
            assert named(refused, "mean persistent=False")
    for refused, notes in ranks.run(2, told, "forgotten"):
        assert not refused and named(notes, "seen")


class Branching(nn.Module):
    """Leaves a branch with BatchNorm out where its samples say so."""

    def __init__(self, leaves: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self.leaves = leaves
        self.used, self.branch = (nn.Linear(3, 4, dtype=F64) for _ in range(2))
        self.norm = nn.BatchNorm1d(5, dtype=F64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.used(x)
        return result if self.leaves(x) else result + self.branch(self.norm(x))


def train_branching(world: World, which: str, **parallel: Any) -> State:
    """Leaves the branch out on one rank, or by the samples of a micro-batch."""
    task = TokenTask(32, ragged=False)
    leaves: dict[str, Callable[[torch.Tensor], bool]] = {
        "rank 1": lambda x: world.rank == 1 and bool(x.any()),
        "at random": lambda x: float(x.flatten()[0]) > 0.3,
    }
    task.model = lambda: Branching(leaves[which])  # type: ignore[method-assign]
    return train(world, task, range(8), None, **parallel)


def train_branching_found(world: World, which: str, reduction: str) -> State:
    more: dict[str, Any] = {"find_unused_parameters": True} if reduction == "all_reduce" else {}
    return train_branching(world, which, reduction=reduction, **more)


@pytest.mark.parametrize("which", ["rank 1", "at random"])
def test_a_branch_may_be_left_out_on_one_rank(ranks: Ranks, which: str) -> None:
    first, second = ranks.run(2, train_branching_found, which, "all_reduce")
    assert_same_bits(first, second)
    for state in ranks.run(2, train_branching_found, which, "tree"):
        for name, tensor in first["model"].items():
            assert torch.allclose(tensor, state["model"][name], rtol=1e-9), name
    if which == "at random":
        alone = ranks.run(1, train_branching_found, which, "tree")[0]
        for name, tensor in first["model"].items():
            assert torch.allclose(tensor, alone["model"][name], rtol=1e-9), name


def _alone_in_leaving(number: int, port: int, pipe: Any) -> None:
    names = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in {**names, "MASTER_PORT": port}.items()})
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with Worker() as worker, joined_world("cpu", 60) as world:
        train_branching(world, "rank 1", bucket_mb=1)
    assert worker.record is not None
    pipe.send((worker.record.code, worker.record.line, worker.record.consequence))
    os._exit(0)


def test_a_branch_left_out_on_one_rank_only_ends_in_one_line() -> None:
    port = free_port()
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(2)]
    processes = [
        context.Process(target=_alone_in_leaving, args=(number, port, pipe[1]))
        for number, pipe in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    outcomes = [pipe[0].recv() if pipe[0].poll(300) else None for pipe in pipes]
    for process in processes:
        process.kill()
        process.join()
    assert outcomes[1] is not None and outcomes[1][0] == 2
    assert named(outcomes[1][1], "branch.weight parallel.find_unused_parameters=true")
    assert outcomes[0] is not None, "it hangs"
    assert outcomes[0][0] == 2 or outcomes[0][2], outcomes[0]
