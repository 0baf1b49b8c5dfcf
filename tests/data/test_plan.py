"""Promise: the order is a pure function of (seed, epoch), for any number of ranks and from any start."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, strategies as st

from tests.helpers.refusals import refused
from tests.helpers.toys import make_recipe
from trainer.commands.check.order import odd_order
from trainer.config.data import Last
from trainer.config.recipe import Recipe
from trainer.config.section import validated
from trainer.data.sampling.group_order import in_blocks
from trainer.data.sampling.plan import Plan, Share, evaluation_share
from trainer.rng import Ints, key, permuted, uniforms
from trainer.train.components.task import make_plan, make_task

pytestmark = pytest.mark.compat
SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(lambda shards: sum(shards) > 0)


def orders(size: int, epochs: int) -> Ints:
    """The orders of many epochs, (epochs, size), asked for at once."""
    epoch, position = np.divmod(np.arange(epochs * size), size)
    return permuted(1, epoch, position, size).reshape(epochs, size)


def assert_uniform(counts: npt.NDArray[Any], freedom: int) -> None:
    """Pearson's chi-squared, up to five of its standard deviations."""
    statistic = float(((counts - counts.mean()) ** 2 / counts.mean()).sum())
    assert abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5


def test_every_size_up_to_the_border_of_the_two_ways_has_permutations() -> None:
    for size in (*range(1, 1101), 2000, 3001, 4097):
        two = np.repeat([3, 7], size)
        order = permuted(5, two, np.tile(np.arange(size), 2), size).reshape(2, size)
        assert np.array_equal(np.sort(order), np.tile(np.arange(size), (2, 1))), size
        assert permuted(5, two[-1:], np.array([size // 2]), size)[0] == order[1, size // 2], "alone as among"


@pytest.mark.parametrize("size", [10, 1100])
def test_positions_and_samples_are_independent(size: int) -> None:
    order = orders(size, 1_000_000 // size)
    table = np.stack([np.bincount(order[:, position], minlength=size) for position in range(size)])
    steps = np.bincount(((order[:, 1:] - order[:, :-1]) % size).flatten(), minlength=size)[1:]
    assert_uniform(table, (size - 1) ** 2)
    assert_uniform(steps, size - 2)


def test_the_order_never_changes_between_versions() -> None:
    """A resumed run must find the order it was started with; so these are written down."""
    first, positions = np.zeros(8, np.int64), np.arange(8)
    assert permuted(0, first, positions, 8).tolist() == [2, 5, 7, 4, 6, 0, 1, 3]
    assert permuted(0, first, positions, 2000).tolist() == [1466, 957, 597, 75, 836, 1079, 1364, 1307]
    assert key(1, 2, 3) == 7702586659592502839
    (numbers,) = uniforms(0, np.zeros(1, np.int64), np.arange(1), 2).tolist()
    assert numbers == [0.7678143382072449, 0.9997203350067139]


def test_augmentation_numbers_are_uniform_and_keyed() -> None:
    epoch, sample = np.zeros(50_000, np.int64), np.arange(50_000)
    numbers = uniforms(0, epoch, sample, 4)
    assert numbers.dtype == np.float32 and numbers.min() >= 0 and numbers.max() < 1
    counts = np.stack([np.histogram(numbers[:, column], 64, (0, 1))[0] for column in range(4)])
    assert_uniform(counts, 4 * 63)
    assert abs(np.corrcoef(numbers.T) - np.eye(4)).max() < 0.02
    assert np.array_equal(uniforms(0, epoch[5:9], sample[5:9], 4), numbers[5:9])
    for other in (uniforms(0, epoch + 1, sample, 4), uniforms(1, epoch, sample, 4)):
        assert not np.array_equal(other, numbers)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    micro_batch_size, last = draw(st.integers(1, 4)), draw(st.sampled_from(get_args(Last)))
    global_batch_size = micro_batch_size * 4 * draw(st.integers(1, 4))
    samples = draw(st.integers(global_batch_size if last == "drop" else 1, 200))
    epochs, seed = draw(st.integers(1, 3)), draw(st.integers(0, 9))
    return Plan(samples, global_batch_size, micro_batch_size, epochs, last, seed)


@given(plan=plans(), world=st.sampled_from((1, 2, 4)))
def test_ranks_together_read_each_step(plan: Plan, world: int) -> None:
    whole = plan.read(np.arange(plan.steps * plan.micro_batches))
    parts = []
    for rank in range(world):
        share = Share(plan, rank, world)
        parts.append(plan.read(share.micro_batches(np.arange(len(share.batches())))))
    for name in ("epoch", "sample", "weight"):
        of_ranks = [getattr(part, name).reshape(plan.steps, -1) for part in parts]
        assert np.array_equal(np.concatenate(of_ranks, 1), getattr(whole, name).reshape(plan.steps, -1))


@given(plan=plans())
def test_each_epoch_holds_each_sample_once_and_counts_add_up(plan: Plan) -> None:
    epoch, sample, weight = (part.flatten() for part in plan.read(np.arange(plan.steps * plan.micro_batches)))
    for number in range(plan.epochs):
        seen = np.sort(sample[(epoch == number) & (weight > 0)])
        if plan.last == "drop":
            assert len(seen) == plan.samples // plan.global_batch_size * plan.global_batch_size
            assert len(np.unique(seen)) == len(seen)
        else:
            assert np.array_equal(seen, np.arange(plan.samples))
    totals, steps = weight.reshape(plan.steps, -1).sum(1).tolist(), range(plan.steps + 1)
    assert totals == [plan.step_samples(step) for step in steps[:-1]]
    assert [plan.samples_seen(step) for step in steps] == [sum(totals[:step]) for step in steps]
    done = [plan.epochs_done(step) for step in steps]
    assert done == sorted(done) and (done[0], done[-1]) == (0, plan.epochs)
    assert plan.last == "cross" or plan.epoch_at(plan.steps) == plan.epochs
    each = np.unique(sample[: plan.global_batch_size][weight[: plan.global_batch_size] > 0])
    assert bool(plan.notes) == (len(each) < plan.global_batch_size)  # of the first step


@given(plan=plans(), epochs=st.integers(1, 3))
def test_the_next_end_of_an_epoch_is_the_first_step_that_ends_one(plan: Plan, epochs: int) -> None:
    for done in range(plan.steps + 1):
        later = range(done + 1, plan.steps + 1)
        through = plan.epochs_done(done) // epochs
        ends = [step for step in later if plan.epochs_done(step) // epochs > through]
        assert plan.next_epoch_end(done, epochs) == (ends[0] if ends else plan.steps + 1)


@pytest.mark.parametrize("last", get_args(Last))
def test_without_shuffling_samples_come_in_the_order_of_the_data(last: Last) -> None:
    data = {"global_batch_size": 8, "micro_batch_size": 4, "last_batch": last, "shuffle": False}
    recipe = make_recipe(epochs=2, data=data)
    plan = make_plan(recipe, make_task(recipe))
    _, sample, weight = plan.read(np.arange(plan.steps * plan.micro_batches))
    expected = [*range(plan.samples // 8 * 8 if last == "drop" else plan.samples)] * 2
    assert sample[weight > 0].tolist()[: len(expected)] == expected
    assert not odd_order(plan)


def test_what_draws_is_refused_without_shuffling() -> None:
    with refused("data.shuffle", "data.class_weights"):
        validated(Recipe, {"epochs": 1, "data": {"shuffle": False, "class_weights": "balanced"}}, "a")


@given(samples=st.integers(1, 100), size=st.integers(1, 16), world=st.integers(1, 5))
def test_evaluation_reads_each_sample_once_in_any_world(samples: int, size: int, world: int) -> None:
    rows: dict[int, list[int]] = {}
    for rank in range(world):
        share = evaluation_share(samples, size, rank, world)
        for micro_batch in share.micro_batches(np.array(share.batches())).tolist():
            _, sample, weight = share.plan.read(np.array([micro_batch]))
            rows[micro_batch] = sample[weight > 0].tolist()
    expected = [list(range(at, min(at + size, samples))) for at in range(0, samples, size)]
    assert [row for _, row in sorted(rows.items()) if row] == expected


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: Plan(100, 10, 3, 1, "cross", 0), "data.micro_batch_size=3"),
        (lambda: Plan(0, 10, 5, 1, "cross", 0), "data"),
        (lambda: Plan(9, 10, 5, 1, "drop", 0), "data"),
        (lambda: Share(Plan(100, 10, 5, 1, "cross", 0), 0, 4), "4"),
    ],
)
def test_what_does_not_divide_is_refused(make: Callable[[], object], names: str) -> None:
    with refused(names):
        make()


def epoch_of(shards: Sequence[int], shards_per_block: int, seed: int = 0, epoch: int = 0) -> Ints:
    total = sum(shards)
    return in_blocks(seed, np.full(total, epoch), np.arange(total), tuple(shards), shards_per_block)


@given(shards=SIZES, of_block=st.integers(1, 31), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_a_stretch_needs_its_blocks_shards(shards: list[int], of_block: int, seed: int, epoch: int) -> None:
    """Wherever one looks, what is needed from there on and was needed before is less than a block's."""
    order = epoch_of(shards, of_block, seed, epoch)
    assert np.array_equal(np.sort(order), np.arange(sum(shards)))
    shard = np.repeat(np.arange(len(shards)), shards)[order]
    places = [np.flatnonzero(shard == number) for number in set(shard.tolist())]
    for position in range(len(order)):
        assert sum(int(place[0]) <= position <= int(place[-1]) for place in places) <= of_block


def test_shards_come_to_each_block_and_samples_to_each_place_equally_often() -> None:
    """Chi-squared over many epochs: (shard, block), and (sample, place in its block)."""
    epoch, position = np.divmod(np.arange(30_000), 30)
    order = in_blocks(3, epoch, position, (5,) * 6, 2).reshape(-1, 30)
    blocks = np.stack([np.bincount((order[:, at * 10 : at * 10 + 10] // 5).ravel()) for at in range(3)]) / 5
    places = np.stack([np.bincount(order[:, at::10].ravel(), minlength=30) for at in range(10)])
    assert_uniform(blocks, 2 * 5)
    assert_uniform(places, 9 * 29)


def test_the_order_in_blocks_never_changes_between_versions() -> None:
    assert epoch_of([3, 0, 4, 2, 1], 2).tolist() == [2, 0, 9, 1, 5, 6, 3, 4, 8, 7]


@given(plan=plans(), shards=SIZES, of_block=st.integers(1, 31))
def test_a_plan_has_its_shards_order_in_every_epoch(plan: Plan, shards: list[int], of_block: int) -> None:
    last = "cross" if sum(shards) < plan.global_batch_size else plan.last
    plan = replace(plan, samples=sum(shards), last=last, shards=tuple(shards), shards_per_block=of_block)
    epoch, sample, weight = (part.flatten() for part in plan.read(np.arange(plan.steps * plan.micro_batches)))
    for number in range(plan.epochs):
        seen = sample[(epoch == number) & (weight > 0)]
        expected = epoch_of(shards, of_block, plan.seed, number)
        assert np.array_equal(seen, expected[: len(seen)])
        assert plan.last == "drop" or len(seen) == plan.samples


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_few_samples_come_in_every_order_equally_often(size: int) -> None:
    _, counts = np.unique(orders(size, 24_000), axis=0, return_counts=True)
    assert len(counts) == math.factorial(size)
    assert_uniform(counts, len(counts) - 1)
