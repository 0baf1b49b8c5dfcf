"""Promise: the scoreboard names winners, losers and failures, and leaves no library out."""

import json
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from benchmarks.paired import median_interval, values_outside
from benchmarks.scoreboard.benches import BENCHES
from benchmarks.scoreboard.figures import (
    BUSY,
    NOT_BEST,
    Absent,
    Counted,
    Part,
    Timed,
    best_rows,
    between,
    outcomes,
    timed,
)
from benchmarks.scoreboard.show import as_json, text
from tests.helpers.scoreboard_parts import (
    COUNTED,
    FAILED,
    MACHINE,
    OVERHEAD,
    PARTS,
    WON,
    rows,
    words,
)


@pytest.mark.parametrize(
    ("ours", "theirs", "outcome"),
    [
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [2.0, 4.0, 6.0, 8.0, 10.0, 12.0], "trainer wins"),
        ([2.2, 4.4, 6.6, 8.8, 11.0, 13.2], [2.0, 4.0, 6.0, 8.0, 10.0, 12.0], "trainer loses"),
        ([1.0, 1.0, 1.0, 1.0, 1.0, 1.1], [1.1, 1.1, 1.1, 1.1, 1.1, 1.0], "undecided"),
        ([1.0] * 5, [2.0] * 5, "undecided"),
        ([1.0] * 6, [1.0] * 6, "undecided"),
    ],
    ids=["wins", "loses", "overlaps", "few rounds", "same"],
)
def test_a_time_is_decided_by_its_whole_interval(
    ours: list[float], theirs: list[float], outcome: str
) -> None:
    """Pair by pair: the machine gets slower all the time, which must not decide."""
    found = timed("trainer", "other", ours, theirs)
    assert found.outcome == outcome
    assert found.rounds == len(ours)
    assert found.low <= found.ratio <= found.high
    assert found.our_cost == pytest.approx(float(np.median(ours)))
    assert found.their_cost == pytest.approx(float(np.median(theirs)))


@given(st.integers(1, 150))
def test_the_interval_holds_the_median_with_at_least_95_percent(count: int) -> None:
    """By Pascal's triangle, row by row in fractions; and it is the narrowest that does."""
    below = [Fraction(1)]  # chance that so many of the values lie below the true median
    for _ in range(count):
        below = [(a + b) / 2 for a, b in pairwise([Fraction(0), *below, Fraction(0)])]

    def coverage(outer: int) -> Fraction:
        return 1 - sum(below[: outer + 1], Fraction()) - sum(below[count - outer :], Fraction())

    outer = values_outside(count)
    assert median_interval([float(n) for n in range(count)])[1:] == (outer, count - 1 - outer)
    if count < 6:
        assert outer == 0
        assert coverage(0) == 1 - Fraction(2, 2**count) < Fraction(95, 100)
    else:
        assert coverage(outer) >= Fraction(95, 100)
        assert 2 * outer + 2 >= count or coverage(outer + 1) < Fraction(95, 100)


def test_a_count_is_decided_by_any_difference() -> None:
    assert Counted("a", 7, 8, 8).outcome == "trainer wins"
    assert Counted("a", 8, 8, 8).outcome == "equal"
    assert Counted("a", 8, 8, 7).outcome == "trainer loses"
    assert Counted("trainer", 8, 8).outcome is None
    assert not Counted("trainer", 8, 8).broken
    assert Counted("trainer", 7, 8).broken
    assert not Counted("a", 7, 8, 8).broken


def test_only_the_best_way_of_a_rival_counts() -> None:
    """However many bad ways it has, wherever they stand."""
    ways = [0.5, 0.6, 1.25, 0.7]
    found = [Timed("trainer 1", f"many, {x}", x, 1.0, x, x - 0.04, x + 0.04, 60, "many") for x in ways]
    apart = Timed("trainer 1, pack", "many", 0.1, 1.0, 0.1, 0.1, 0.1, 60, apart="shrunk: not compared")
    counts = [Counted(f"many, {n}", n, 8, 8, rival="many") for n in (0, 7, 3)]
    parts = [Part("overhead", [apart, *found, WON]), Part("resume", [Counted("trainer 1", 8, 8), *counts])]
    assert best_rows(parts[0]) == [found[2], WON]
    assert best_rows(parts[1]) == [counts[1]]
    page = text(parts, MACHINE)
    assert rows(page, "Who wins") == [["overhead", "1", "1", "0", "0"], ["resume", "1", "0", "0", "0"]]
    assert [row[-1] for row in rows(page, BENCHES["overhead"].title)] == [
        *("shrunk: not compared", NOT_BEST, NOT_BEST, "**trainer loses**", NOT_BEST, "trainer wins")
    ]
    counted = [row[-1] for row in rows(page, BENCHES["resume"].title)]
    assert counted == ["", NOT_BEST, "trainer wins", NOT_BEST]
    drawn = [word.rpartition(": ")[2] for word in words(parts)]
    assert drawn.count("not compared") == 1
    assert drawn.count("trainer loses") == 1
    assert drawn.count("trainer wins") == 2
    figures = json.loads(as_json(parts, MACHINE, "x"))["benches"][0]["rows"]
    assert [row["outcome"] for row in figures] == [*(None, None, None, "trainer loses", None, "trainer wins")]


def test_what_failed_is_said_and_so_is_a_broken_promise() -> None:
    page = text(PARTS, MACHINE)
    assert page.count("RuntimeError: it fell | over") == 2
    failing = Part("overhead", [WON, Absent("quick 1.0", "failed: KeyError: a|b", failed=True)], "x")
    assert "a\\|b |" in text([failing], MACHINE)
    assert "- **Failed:** overhead against quick 1.0: failed: KeyError: a|b." in text([failing], MACHINE)
    assert failing.failures
    assert FAILED.failures
    assert not OVERHEAD.failures
    broken = Part("accumulation", [Counted("trainer 1", 7, 8)], "x")
    assert broken.failures
    assert "breaks its promise" in text([broken], MACHINE)


@pytest.mark.parametrize("shares", [(0.99, 0.4), (0.4, 0.99)])
def test_times_of_a_busy_machine_decide_nothing(shares: tuple[float, float]) -> None:
    busy = between(OVERHEAD, *shares)
    for outcome in ("trainer wins", "trainer loses"):
        assert outcomes([busy], outcome) == []
    page = text([busy, COUNTED], MACHINE)
    assert "**Other work ran beside overhead:" in page
    assert "99 % and 40 %" in page.replace("\u00a0", " ") or "40 % and 99 %" in page.replace("\u00a0", " ")
    assert [row[-1] for row in rows(page, BENCHES["overhead"].title)][:3] == [BUSY] * 3
    assert "loses nowhere" in page
    assert "loses nowhere" not in text([busy], MACHINE)
    assert "- Nothing is decided here." in text([busy], MACHINE)
    assert sum("undecided: other" in word for word in words([busy])) == 3
    quietly = between(OVERHEAD, 0.99, 0.97)
    assert len(outcomes([quietly], "trainer loses")) == 1
    page = text([quietly, COUNTED], MACHINE)
    assert "ther work ran beside" not in page
    assert page.count("Just before and just after, this process got") == 1
    assert "in between isn't seen" in page
