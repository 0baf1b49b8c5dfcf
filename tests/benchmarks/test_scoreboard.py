"""Promise: the scoreboard names winners, losers and failures, and leaves no library out."""

from typing import Any

import numpy as np
import pytest

from benchmarks.scoreboard.figures import Counted, timed


@pytest.mark.parametrize(
    ("ours", "theirs", "outcome"),
    [
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [2.0, 4.0, 6.0, 8.0, 10.0, 12.0], "trainer wins"),
        ([2.2, 4.4, 6.6, 8.8, 11.0, 13.2], [2.0, 4.0, 6.0, 8.0, 10.0, 12.0], "trainer loses"),
        ([1.0, 1.0, 1.0, 1.0, 1.0, 1.1], [1.1, 1.1, 1.1, 1.1, 1.1, 1.0], "undecided"),
        ([1.0] * 5, [2.0] * 5, "undecided"),
    ],
)
def test_a_time_is_decided_by_its_whole_interval(ours: Any, theirs: Any, outcome: str) -> None:
    found = timed("trainer", "other", ours, theirs)
    assert (found.outcome, found.rounds) == (outcome, len(ours))
    assert found.low <= found.ratio <= found.high
    assert (found.our_cost, found.their_cost) == pytest.approx((np.median(ours), np.median(theirs)))


def test_a_count_is_decided_by_any_difference() -> None:
    found = [Counted("a", ours, 8, theirs).outcome for ours, theirs in ((7, 8), (8, 8), (8, 7))]
    assert found == ["trainer wins", "equal", "trainer loses"]
    assert Counted("trainer", 8, 8).outcome is None
    broken = [Counted("trainer", 8, 8), Counted("trainer", 7, 8), Counted("a", 7, 8, 8)]
    assert [one.broken for one in broken] == [False, True, False]
