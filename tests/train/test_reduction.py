"""Promise: a checkpoint's sum of losses is the whole run's, on whatever number of ranks it goes on.

And gradients cross the network once in a step.
"""

from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.futures import Future

from tests.helpers.toys import TokenTask, make_recipe
from tests.helpers.world import Ranks
from trainer.distributed import parallel
from trainer.distributed.parallel import World, sum_hook
from trainer.train.components.run import build
from trainer.train.step import train_step


def kept_and_taken(world: World, how: str, kept: list[float]) -> tuple[list[float], float]:
    """What a checkpoint keeps of this rank's losses (its number and one), and this rank's part of `kept`."""
    data = {"global_batch_size": 8, "micro_batch_size": 2}
    recipe = make_recipe(data=data, parallel={"threads": 1, "reduction": how})
    reduction = build(recipe, TokenTask(16), world, workers=0).reduction
    loss = torch.tensor(world.rank + 1.0, dtype=torch.float64)
    return reduction.gather_losses(loss).tolist(), reduction.own_loss(kept)


@pytest.mark.parametrize(
    ("kept", "own"),
    [([3.0, 4.0], [3.0, 4.0]), ([3.0, 4.0, 5.0, 6.0], [18.0, 0.0]), ([3.0], [3.0, 0.0])],
    ids=["of the same ranks", "of more", "of fewer"],
)
def test_each_rank_has_its_own_part(ranks: Ranks, kept: list[float], own: list[float]) -> None:
    for rank, answer in enumerate(ranks.run(2, kept_and_taken, "all_reduce", kept)):
        assert answer == ([1.0, 2.0], own[rank])


@pytest.mark.parametrize("kept", [[3.0], [1.0, 2.0]], ids=["of a tree", "of ranks"])
def test_with_a_tree_each_rank_has_the_whole(ranks: Ranks, kept: list[float]) -> None:
    for rank, answer in enumerate(ranks.run(2, kept_and_taken, "tree", kept)):
        assert answer == ([rank + 1.0], 3.0)


def reduced_in_a_step(world: World, micro_batch_size: int) -> list[int]:
    """Numbers of the micro-batches in whose backward pass DDP sends a bucket."""
    sent, calls = list[int](), 0

    def noted(
        group: dist.ProcessGroup,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> Future[torch.Tensor]:
        sent.append(calls)
        return sum_hook(group, bucket)

    def counted(*_: Any) -> None:
        nonlocal calls
        calls += 1

    recipe = make_recipe(data={"global_batch_size": 16, "micro_batch_size": micro_batch_size})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "sum_hook", noted)
        run = build(recipe, TokenTask(16), world, workers=0)
    sent.clear()  # its buckets are laid out by sending them once
    run.replica.register_forward_pre_hook(counted)
    train_step(run, run.loader(run.share.batches()), 0)
    return sent


def test_only_the_last_micro_batch_crosses_the_network(ranks: Ranks) -> None:
    for sent in ranks.run(2, reduced_in_a_step, 2):
        assert set(sent) == {4}
