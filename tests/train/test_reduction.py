"""Promise: a checkpoint's sum of losses is the whole run's, on whatever number of ranks it goes on.

And gradients cross the network once in a step.
"""

from typing import Any

import pytest
import torch
from torch import distributed as dist, nn
from torch.futures import Future

from tests.helpers.refusals import refused
from tests.helpers.steps import go
from tests.helpers.toys import TokenTask, build_alone, make_recipe
from tests.helpers.world import Ranks
from trainer.distributed import parallel
from trainer.distributed.parallel import World, sum_hook
from trainer.train.components.run import build
from trainer.train.reduction import GivenCount, Gradients
from trainer.train.step import take_metrics

SIZES = {"global_batch_size": 8, "micro_batch_size": 2}


def kept_and_taken(world: World, how: str, kept: list[float]) -> tuple[list[float], float]:
    """What a checkpoint keeps of this rank's losses (its number and one), and this rank's part of `kept`."""
    recipe = make_recipe(data=SIZES, parallel={"threads": 1, "reduction": how})
    reduction = build(recipe, TokenTask(16), world, workers=0).reduction
    loss = torch.tensor(world.rank + 1.0, dtype=torch.float64)
    return reduction.gather_losses(loss).tolist(), reduction.own_loss(kept)


@pytest.mark.parametrize(
    ("how", "kept", "own"),
    [
        ("all_reduce", [3.0, 4.0], [3.0, 4.0]),
        ("all_reduce", [3.0, 4.0, 5.0, 6.0], [18.0, 0.0]),
        ("all_reduce", [3.0], [3.0, 0.0]),
        ("tree", [3.0], [3.0, 3.0]),
        ("tree", [1.0, 2.0], [3.0, 3.0]),
    ],
    ids=["of the same ranks", "of more", "of fewer", "of a tree", "of ranks by a tree"],
)
def test_each_rank_has_its_own_part_or_by_a_tree_the_whole(
    ranks: Ranks, how: str, kept: list[float], own: list[float]
) -> None:
    for rank, answer in enumerate(ranks.run(2, kept_and_taken, how, kept)):
        assert answer == ([rank + 1.0] if how == "tree" else [1.0, 2.0], own[rank])


def reduced_in_a_step(world: World) -> list[int]:
    """Numbers of the micro-batches in whose backward pass DDP sends a bucket."""
    sent, calls = list[int](), 0

    def noted(group: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:  # type: ignore[name-defined]
        sent.append(calls)
        return sum_hook(group, bucket)

    def counted(*_: Any) -> None:
        nonlocal calls
        calls += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "sum_hook", noted)
        run = build(make_recipe(data=SIZES), TokenTask(16), world, workers=0)
    sent.clear()  # its buckets are laid out by sending them once
    run.replica.register_forward_pre_hook(counted)
    go(run, range(1))
    return sent


def test_only_the_last_micro_batch_crosses_the_network(ranks: Ranks) -> None:
    for sent in ranks.run(2, reduced_in_a_step):
        assert set(sent) == {2}


@pytest.mark.parametrize("share", [0.75, -3.0])
def test_gradients_are_divided_exactly_by_what_counts_in_each_dtype(share: float) -> None:
    """Also where weights below zero count; a factor in the first one's bfloat16 is off by 0.3 %."""
    model = nn.ParameterList([torch.ones(1, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)])
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    run = build_alone(make_recipe(data=SIZES), TokenTask(16, ragged=False))
    given = torch.tensor([1.0, share], dtype=torch.float64)
    assert GivenCount(run.items, 0, None).correct(given, Gradients(model)).item() == 1 / share
    assert [p.grad.item() for p in model] == [torch.tensor(1 / share, dtype=p.dtype).item() for p in model]


def test_a_parameter_that_is_trained_later_is_refused() -> None:
    run = build_alone(make_recipe(data=SIZES, model={"freeze": ["0.weight"]}), TokenTask(16))
    take_metrics(run)
    run.state.model.requires_grad_(True)
    with refused("0.weight", "--init-from"):
        take_metrics(run)
