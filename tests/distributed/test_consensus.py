"""Promise: whichever rank gets a signal, all stop after the same step, without waiting."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from tests.helpers.world import Ranks
from trainer.distributed.consensus import StopConsensus
from trainer.distributed.parallel import World


@contextmanager
def clock() -> Iterator[mock.Mock]:
    """Time that passes as its `monotonic.return_value` is told."""
    with mock.patch("trainer.distributed.consensus.time") as time:
        time.monotonic.return_value = 0.0
        yield time.monotonic


def run_with_a_signal(world: World, rank: int, at: int, seconds: tuple[float, ...]) -> Any:
    """Steps until all stop; the rank gets its signal in one of them, ranks differ in speed."""
    with clock() as time:
        consensus = StopConsensus(world.group, 0)
        asked = 0
        for step in range(1, 100_000):
            time.return_value += seconds[world.rank % len(seconds)]
            signal = 15 if world.rank == rank and step >= at else 0
            before = consensus._under_way
            decision = consensus.after(step, signal, save=False)
            asked += consensus._under_way is not before
            if decision.signal:
                return step, decision.signal, asked
    return None


@pytest.mark.parametrize(
    ("size", "seconds", "at", "latest"),
    [(1, (0.0,), 300, 300), (2, (0.0,), 300, 10_003), (4, (0.002, 0.0), 300, 504), (2, (0.15, 0.12), 3, 9)],
)
def test_all_ranks_stop_after_the_same_step(
    ranks: Ranks, size: int, seconds: Any, at: int, latest: int
) -> None:
    """Within a second of the slowest, and ten thousand steps."""
    answers = ranks.run(size, run_with_a_signal, size - 1, at, seconds)
    assert len({step for step, _, _ in answers}) == 1
    step, signal, _ = answers[0]
    assert signal == 15 and at <= step <= latest


def test_it_is_asked_about_once_a_second(ranks: Ranks) -> None:
    ((step, _, asked), _) = ranks.run(2, run_with_a_signal, 0, 9_500, (0.001,))
    assert 10_000 <= step <= 10_050
    assert asked // 2 == 11, "begun and read; first after step 1"


def run_per_step(world: World) -> list[float]:
    """The time per step that each all-reduce gives; its own rank's is the slowest."""
    with clock() as time, mock.patch("trainer.distributed.consensus.SECONDS_BETWEEN", 0.02):
        consensus, seen = StopConsensus(world.group, 0), list[float]()
        for step in range(1, 60):
            time.return_value += 0.01
            before = consensus._under_way
            consensus.after(step, 0, save=False)
            if before is not None:
                seen.append(float(consensus._reduced[2]))
        return seen


def test_the_time_per_step_is_that_of_the_steps_since_the_last(ranks: Ranks) -> None:
    (seen, _) = ranks.run(2, run_per_step)
    assert len(seen) >= 4 and seen == pytest.approx([0.01] * len(seen))


def saves(world: World) -> list[int]:
    with clock() as time:
        consensus = StopConsensus(world.group, 0)
        seen: list[int] = []
        for step in range(1, 41):
            time.return_value += 0.11
            due = world.rank == 0 and step >= 10 * (len(seen) + 1)
            if consensus.after(step, 0, due).save:
                seen.append(step)
        return seen


def test_a_checkpoint_that_one_rank_finds_due_is_everybodys(ranks: Ranks) -> None:
    first, second = ranks.run(2, saves)
    assert first == second and len(first) in (2, 3)
