"""Promise: with parallel.reduction=tree the number of ranks changes not one bit."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from tests.helpers.digits_steps import DIGITS
from tests.helpers.refusals import refused
from tests.helpers.steps import ALONE, State, assert_same_bits, train_some
from tests.helpers.toys import TokenTask, make_recipe, run_steps
from tests.helpers.world import SIZES, Ranks
from trainer.distributed.parallel import World
from trainer.distributed.tree import Sums, Tournament, TreeReduction
from trainer.train.components.run import build
from trainer.train.components.task import check_request, make_task
from trainer.train.start.rank import choose_threads
from trainer.train.step import take_metrics

KINDS: dict[str, dict[str, Any]] = {
    "batchnorm": {"model": {"width": 8, "norm": "batch"}},
    "groupnorm, dropout and mixup": {
        "model": {"width": 8, "norm": "group", "dropout": 0.3},
        "regularization": {"mixup": 0.3},
    },
    "fp16": {"precision": {"mode": "fp16", "initial_scale": 2.0**24, "growth_interval": 2}},
}


def by_tree(values: list[float]) -> float:
    """The definition, written as a recursion: the left branch is the largest power of two that is smaller."""
    if len(values) == 1:
        return values[0]
    left = 1 << (len(values) - 1).bit_length() - 1
    return by_tree(values[:left]) + by_tree(values[left:])


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=70))
def test_a_tournament_adds_by_the_tree(values: list[float]) -> None:
    tournament = Tournament()
    for _ in range(2):  # it starts anew
        for value in values:
            tournament.add(Sums([torch.zeros(1)], torch.tensor([value], dtype=torch.float64)))
        assert float(tournament.total().metrics) == by_tree(values)


def train_tokens(world: World, reduction: str) -> tuple[float, list[torch.Tensor]]:
    """Loss and weights after steps whose valid tokens are known late, of which the last is padded."""
    recipe = make_recipe(
        data={"global_batch_size": 8, "micro_batch_size": 1, "last_batch": "weighted"},
        optim={"lr": 0.1, "max_grad_norm": 0.5},
        parallel={"threads": 1, "reduction": reduction},
    )
    run_steps(run := build(recipe, TokenTask(29, dtype=torch.float32), world, workers=0))
    return float(take_metrics(run)["loss"]), [p.detach().clone() for p in run.gradients.parameters]


def test_valid_tokens_and_padding(ranks: Ranks) -> None:
    wanted = ranks.run(1, train_tokens, "tree")[0]
    for size in SIZES:
        for found in ranks.run(size, train_tokens, "tree"):
            assert_same_bits(found, wanted)
    plain, _ = ranks.run(1, train_tokens, "all_reduce")[0]
    assert plain == pytest.approx(wanted[0], rel=1e-5)  # it is the same loss


class Sometimes(nn.Module):
    """A weight takes part only in micro-batches whose first number is large, another never does."""

    def __init__(self, above: float) -> None:
        super().__init__()
        self.above = above
        self.used, self.idle = (nn.Linear(3, 4, dtype=torch.float64) for _ in range(2))
        self.norm = nn.BatchNorm1d(5, momentum=None, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.used(x)
        if float(x.flatten()[0]) > self.above:
            result = result + self.idle(self.norm(x))
        return result


def trained(world: World, model: Callable[[], nn.Module], reduction: str) -> dict[str, torch.Tensor]:
    task = TokenTask(32, ragged=False)
    task.model = model  # type: ignore[method-assign]
    recipe = make_recipe(
        epochs=2,
        data={"global_batch_size": 8, "micro_batch_size": 2},
        optim={"lr": 0.01, "weight_decay": 0.1},
        parallel={"threads": 1, "reduction": reduction},
    )
    run_steps(run := build(recipe, task, world, workers=0))
    return {name: tensor.clone() for name, tensor in run.state.model.state_dict().items()}


@pytest.mark.parametrize("above", [0.3, 9.0])
def test_what_a_micro_batch_leaves_out_counts_for_nothing(ranks: Ranks, above: float) -> None:
    """In some micro-batches or in all; weight decay would tell a gradient of zero from none."""
    model = partial(Sometimes, above)
    wanted, plain = (ranks.run(1, trained, model, how)[0] for how in ("tree", "all_reduce"))
    for size in SIZES[1:]:
        for answer in ranks.run(size, trained, model, "tree"):
            assert_same_bits(answer, wanted)
    torch.testing.assert_close(plain, wanted, rtol=1e-9, atol=1e-8)


class Running(nn.Module):
    """Keeps statistics that BatchNorm knows nothing of, in place, by assignment, and as integers."""

    mean: torch.Tensor
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4, dtype=torch.float64))
        self.instance = nn.InstanceNorm1d(5, track_running_stats=True, dtype=torch.float64)
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
            self.seen += 1
        result: torch.Tensor = self.linear(self.instance(x) - self.mean)
        return result


def test_other_running_statistics_are_the_same_on_any_ranks(ranks: Ranks) -> None:
    wanted = ranks.run(1, trained, Running, "tree")[0]
    assert int(wanted["seen"]) == 8, "it counts steps"
    assert float(wanted["mean"].abs().min()) > 0
    for size in SIZES[1:]:
        for answer in ranks.run(size, trained, Running, "tree"):
            assert_same_bits(answer, wanted)
    for answer in ranks.run(2, trained, Running, "all_reduce"):
        torch.testing.assert_close(answer, wanted, rtol=1e-9, atol=1e-8)


def refused_sometimes(world: World) -> None:
    with refused("idle.weight, idle.bias parallel.find_unused_parameters=true"):
        trained(world, partial(Sometimes, 9.0), "all_reduce")


def test_parameters_without_a_gradient_are_named(ranks: Ranks) -> None:
    ranks.run(2, refused_sometimes)


def starts_apart(world: World) -> torch.Tensor:
    """A weight of a run that was built where the ranks' models were not the same."""
    recipe = make_recipe(parallel={"reduction": "tree"}, data={"global_batch_size": 8, "micro_batch_size": 1})
    task = TokenTask(16)
    model = task.model()
    first = next(model.parameters())
    first.data = first.data.t().contiguous().t().fill_(float(world.rank + 1))
    task.model = lambda: model  # type: ignore[method-assign]
    run = build(recipe, task, world, workers=0)
    return next(run.state.model.parameters()).detach().clone()


def test_all_ranks_take_the_first_ones_weights(ranks: Ranks) -> None:
    assert all(float(weight.mean()) == 1.0 for weight in ranks.run(2, starts_apart))


@pytest.mark.parametrize("key", ["compress", "sync_batchnorm", "find_unused_parameters"])
def test_what_a_tree_does_not_go_with_is_refused(key: str) -> None:
    with refused(f"parallel.{key}", by=ValueError):
        make_recipe(parallel={"reduction": "tree", key: "bf16" if key == "compress" else True})


def test_ranks_that_split_no_tree_are_refused() -> None:
    sizes, task = {"global_batch_size": 12, "micro_batch_size": 1}, TokenTask(24)
    recipe = make_recipe(parallel={"reduction": "tree"}, data=sizes)
    for fitting in (1, 3, 6, 12):
        check_request(recipe, task, fitting)
    with refused("parallel.reduction=tree", 12, 2):
        check_request(recipe, task, 2)


def steps_of(world: World, values: dict[str, Any], steps: range, state: State | None) -> tuple[State, Any]:
    recipe = make_recipe(**values)
    return train_some(recipe, make_task(recipe), steps, state, world)


@pytest.mark.parametrize("kind", KINDS)
def test_other_ranks_go_on_to_the_same_bits(ranks: Ranks, kind: str) -> None:
    values = {**DIGITS, **KINDS[kind], "parallel": {"threads": 1, "reduction": "tree"}}
    wanted, _ = ranks.run(1, steps_of, values, range(6), None)[0]
    state = None
    for size, steps in ((4, range(2)), (1, range(2, 3)), (2, range(3, 6))):
        (state, _), *others = ranks.run(size, steps_of, values, steps, state)
        assert_same_bits([other for other, _ in others], [state] * len(others))
    assert_same_bits(state, wanted)


def test_threads_do_not_depend_on_the_number_of_ranks() -> None:
    tree = make_recipe(parallel={"reduction": "tree"})
    for ranks_here in (1, 2, 4):
        threads, (note,) = choose_threads(tree, None, "auto", replace(ALONE, local_size=ranks_here))
        assert threads == 1 and "parallel.threads" in note
    set_by_hand = make_recipe(parallel={"reduction": "tree", "threads": 3})
    assert choose_threads(set_by_hand, None, "auto", ALONE) == (3, [])


def test_gradients_of_several_dtypes_are_added_each_in_its_own(ranks: Ranks) -> None:
    wanted = ranks.run(1, reduce_mixed)[0]
    for size in SIZES[1:]:
        for sums in ranks.run(size, reduce_mixed):
            assert_same_bits(sums, wanted)


def reduce_mixed(world: World) -> list[torch.Tensor]:
    tree = TreeReduction(world.group, 25)
    for micro_batch in range(world.rank * 4 // world.size, (world.rank + 1) * 4 // world.size):
        random = torch.Generator().manual_seed(micro_batch)
        kinds = (torch.bfloat16, torch.float32, torch.float64, torch.bfloat16)
        gradients = [torch.randn(99, generator=random).to(kind) for kind in kinds]
        tree.add_micro_batch(gradients, torch.ones(1, dtype=torch.float64))
    return tree.end_step().gradients
