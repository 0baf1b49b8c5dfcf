"""Promise: whichever rank gets the signal, all stop after the same window, and nobody waits for it."""

import time
from typing import Any

import pytest

from tests.helpers.world import Ranks
from trainer.agreement import Agreement
from trainer.parallel import World


def run_with_a_signal(world: World, rank: int, at: int, seconds: tuple[float, ...]) -> Any:
    """Windows until all stop; the rank gets its signal in one of them, ranks differ in speed."""
    agreement = Agreement(world.group, 0)
    asked = 0
    for window in range(1, 100_000):
        time.sleep(seconds[world.rank % len(seconds)])
        signal = 15 if world.rank == rank and window >= at else 0
        before = agreement._under_way
        decision = agreement.after(window, signal, save=False)
        asked += agreement._under_way is not before
        if decision.signal:
            return window, decision.signal, asked
    return None


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("seconds", [(0.0,), (0.002, 0.0), (0.15, 0.12)])
def test_all_ranks_stop_after_the_same_window(ranks: Ranks, size: int, seconds: tuple[float, ...]) -> None:
    at = 3 if seconds[0] > 0.1 else 300
    answers = ranks.run(size, run_with_a_signal, size - 1, at, seconds)
    assert len({window for window, _, _ in answers}) == 1
    window, signal, _ = answers[0]
    assert signal == 15
    if seconds[0] > 0.1:
        assert window <= at + 1 / 0.12 + 2
    if seconds[0] == 0.002 and size > 1:
        assert window - at < 3 / 0.002


def test_it_is_asked_about_once_a_second(ranks: Ranks) -> None:
    start = time.monotonic()
    answers = ranks.run(2, run_with_a_signal, 0, 2000, (0.001,))
    elapsed = time.monotonic() - start
    assert answers[0][2] < 4 * elapsed + 10


def saves(world: World) -> list[int]:
    agreement = Agreement(world.group, 0)
    seen: list[int] = []
    for window in range(1, 41):
        time.sleep(0.11)
        due = world.rank == 0 and window >= 10 * (len(seen) + 1)
        if agreement.after(window, 0, due).save:
            seen.append(window)
    return seen


def test_a_checkpoint_that_one_rank_finds_due_is_everybodys(ranks: Ranks) -> None:
    first, second = ranks.run(2, saves)
    assert first == second
    assert len(first) in (2, 3)
