"""Promise: where not all shards fit, the order needs few at a time and is still looked up, not carried."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, strategies as st

from trainer.config.data import Last
from trainer.data.sampling.group_order import in_blocks
from trainer.data.sampling.plan import Plan
from trainer.rng import Ints

pytestmark = pytest.mark.compat

sizes = st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(lambda shards: sum(shards) > 0)


def epoch_of(shards: list[int], shards_per_block: int, seed: int = 0, epoch: int = 0) -> Ints:
    total = sum(shards)
    return in_blocks(seed, np.full(total, epoch), np.arange(total), tuple(shards), shards_per_block)


@given(shards=sizes, of_block=st.integers(1, 31), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_a_stretch_needs_the_shards_of_its_block(
    shards: list[int], of_block: int, seed: int, epoch: int
) -> None:
    """Wherever one looks, what is needed from there on and was needed before is less than a block's."""
    order = epoch_of(shards, of_block, seed, epoch)
    assert np.array_equal(np.sort(order), np.arange(sum(shards)))
    shard = np.repeat(np.arange(len(shards)), shards)[order]
    places = [np.flatnonzero(shard == number) for number in set(shard.tolist())]
    for position in range(len(order)):
        assert sum(int(place[0]) <= position <= int(place[-1]) for place in places) <= of_block


def test_shards_come_to_each_block_and_samples_to_each_place_equally_often() -> None:
    """Chi-squared over many epochs: (shard, block), and (sample, place in its block)."""
    epochs, shards = 1000, [5] * 6
    epoch = np.repeat(np.arange(epochs), 30)
    order = in_blocks(3, epoch, np.tile(np.arange(30), epochs), tuple(shards), 2).reshape(epochs, 30)
    block_of = np.stack([np.bincount((order[:, at * 10 : at * 10 + 10] // 5).ravel()) for at in range(3)]) / 5
    place_of = np.stack([np.bincount(order[:, at::10].ravel(), minlength=30) for at in range(10)])
    for counts, freedom in ((block_of, 2 * 5), (place_of, 9 * 29)):
        statistic = float(((counts - counts.mean()) ** 2 / counts.mean()).sum())
        assert statistic < freedom + 6 * (2 * freedom) ** 0.5


def test_the_order_never_changes_between_versions() -> None:
    """A resumed run must find the order it was started with; so it is written down."""
    assert epoch_of([3, 0, 4, 2, 1], 2).tolist() == [2, 0, 9, 1, 5, 6, 3, 4, 8, 7]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    shards, micro_batch_size = tuple(draw(sizes)), draw(st.integers(1, 4))
    last: Last = draw(st.sampled_from(get_args(Last)))
    if last == "drop" and sum(shards) < 4 * micro_batch_size:
        last = "cross"
    epochs, seed, of_block = draw(st.integers(1, 3)), draw(st.integers(0, 9)), draw(st.integers(1, 31))
    plan = Plan(sum(shards), 4 * micro_batch_size, micro_batch_size, epochs, last, seed)
    return replace(plan, shards=shards, shards_per_block=of_block)


@given(plan=plans())
def test_a_plan_has_this_order_in_every_epoch_also_across_the_border(plan: Plan) -> None:
    epoch, sample, weight = (part.flatten() for part in plan.read(np.arange(plan.steps * plan.micro_batches)))
    for number in range(plan.epochs):
        seen = sample[(epoch == number) & (weight > 0)]
        expected = epoch_of(list(plan.shards), plan.shards_per_block, plan.seed, number)
        assert np.array_equal(seen, expected[: len(seen)])
        assert plan.last == "drop" or len(seen) == plan.samples
