"""Promise: a model's own statistics get one update a step, on any number of ranks, and go on exactly."""

import multiprocessing
import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tests.helpers.ports import free_port
from tests.helpers.refusals import named
from tests.helpers.steps import State, assert_same_bits, train_some
from tests.helpers.toys import TokenTask, build_alone, make_recipe
from tests.helpers.world import Ranks
from trainer.config.recipe import Recipe
from trainer.distributed.parallel import World, joined_world
from trainer.errors import BadInputError
from trainer.launch.worker import Worker
from trainer.train.components.run import build
from trainer.train.step import train_step

F64 = torch.float64


class Keeping(nn.Module):
    """Keeps statistics of its own, in ways that the kind names."""

    mean: torch.Tensor
    seen: torch.Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4, dtype=F64))
        self.norm = nn.InstanceNorm1d(5, track_running_stats=True, dtype=F64)
        start = torch.zeros(3, dtype=torch.complex64 if kind == "complex" else F64)
        self.register_buffer("mean", None if kind == "made later" else start, kind != "forgotten")
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
                case _:
                    self.mean = 0.9 * self.mean + 0.1 * now
            self.seen += 1
        shift = self.mean.abs() if self.kind in ("replaced", "complex") else 0.0
        result: torch.Tensor = self.linear(self.norm(x) - shift)
        return result


def task_of(kind: str) -> TokenTask:
    return TokenTask(32, ragged=False, make=lambda: Keeping(kind))


def recipe_of(reduction: str = "all_reduce", **parallel: Any) -> Recipe:
    data, optim = {"global_batch_size": 8, "micro_batch_size": 2}, {"lr": 0.01, "weight_decay": 0.1}
    parallel = {"threads": 1, "reduction": reduction, **parallel}
    return make_recipe(epochs=2, data=data, optim=optim, ema={"decay": 0.9}, parallel=parallel)


def train(world: World, kind: str, steps: range, state: State | None, reduction: str) -> State:
    """Trains some steps of a run, from a saved state; gives the state after them."""
    return train_some(recipe_of(reduction), task_of(kind), steps, state, world)[0]


@pytest.mark.parametrize(("kind", "reduction"), [("replaced", "all_reduce"), ("complex", "tree")])
def test_a_run_on_two_ranks_goes_on_exactly(ranks: Ranks, kind: str, reduction: str) -> None:
    """Each rank from the first one's state, as a checkpoint holds it."""
    whole, other = ranks.run(2, train, kind, range(5), None, reduction)
    begun = ranks.run(2, train, kind, range(2), None, reduction)
    assert_same_bits(whole, other)
    for state in ranks.run(2, train, kind, range(2, 5), begun[0], reduction):
        assert_same_bits(whole, state)
    mean = whole["model"]["mean"]
    assert int(whole["model"]["seen"]) == 5 and float(mean.abs().min()) > 0
    assert kind != "complex" or float(mean.imag.min()) > 0


def test_statistics_of_ones_own_are_those_of_torch() -> None:
    """One update a step of one micro-batch: what the model itself would do."""
    recipe = make_recipe(data={"global_batch_size": 8, "micro_batch_size": 8}, optim={"lr": 1e-9})
    for kind in ("complex", "replaced"):
        run = build_alone(recipe, task_of(kind))
        alone = Keeping(kind).train()
        alone.load_state_dict(run.state.model.state_dict())
        for step, batch in zip(range(4), run.loader(run.share.batches()), strict=False):
            train_step(run, iter([batch]), step)
            alone(batch.fields["x"])
        assert_close(dict(run.state.model.named_buffers()), dict(alone.named_buffers()), rtol=1e-6, atol=1e-8)


def told(world: World, kind: str) -> tuple[str, str]:
    """What is refused, or what is said."""
    try:
        return "", "\n".join(build(recipe_of(), task_of(kind), world, 0).notes)
    except BadInputError as error:
        return str(error), ""


def test_what_no_checkpoint_could_hold_is_refused_before_training(ranks: Ranks) -> None:
    for kind in ("reshaped", "made later"):
        for refused, _ in ranks.run(2, told, kind):
            assert named(refused, "mean persistent=False")
    for refused, notes in ranks.run(2, told, "forgotten"):
        assert not refused and named(notes, "seen")


class Branching(nn.Module):
    """Leaves a branch out on one rank."""

    def __init__(self, leaves: bool) -> None:
        super().__init__()
        self.leaves = leaves
        self.used, self.branch = (nn.Linear(3, 4, dtype=F64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.used(x)
        return result if self.leaves else result + self.branch(x)


def _alone_in_leaving(number: int, port: int, pipe: Any) -> None:
    names = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in {**names, "MASTER_PORT": port}.items()})
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with Worker() as worker, joined_world("cpu", 60) as world:
        task = TokenTask(32, ragged=False, make=lambda: Branching(world.rank == 1))
        train_some(recipe_of(bucket_mb=1), task, range(8), world=world)
    assert worker.record is not None
    pipe.send((worker.record.code, worker.record.line, worker.record.consequence))
    os._exit(0)


def test_a_branch_left_out_on_one_rank_only_ends_in_one_line() -> None:
    port = free_port()
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(2)]
    ranks = [(number, port, pipe) for number, (_, pipe) in enumerate(pipes)]
    processes = [context.Process(target=_alone_in_leaving, args=rank) for rank in ranks]
    for process in processes:
        process.start()
    first, second = (pipe.recv() if pipe.poll(300) else None for pipe, _ in pipes)
    for process in processes:
        process.kill()
        process.join()
    assert second is not None and second[0] == 2
    assert named(second[1], "branch.weight parallel.find_unused_parameters=true")
    assert first is not None, "it hangs"
    assert first[0] == 2 or first[2], first
