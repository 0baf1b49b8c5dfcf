"""Promise: the scoreboard counts or times all libraries alike; a library that fails has a row."""

import json
from collections.abc import Sequence

import pytest

from benchmarks import accumulation, against, loader, resume
from benchmarks.accumulation import CASES
from benchmarks.against import Judged
from benchmarks.scoreboard.benches import QUICK
from benchmarks.scoreboard.counted import by_accumulation, by_resume, count_cuts, count_steps
from benchmarks.scoreboard.figures import (
    Absent,
    Counted,
    Part,
    Timed,
    best_rows,
    outcomes,
)
from benchmarks.scoreboard.timed import by_loader, by_overhead


def score(cut: list[int], due: list[int], right: int) -> accumulation.Score:
    return accumulation.Score(cut, due, 0.0, [], right == len(due), right)


def test_steps_are_compared_on_the_cases_that_both_did() -> None:
    def judged(name: str, variant: str, rights: Sequence[int | None]) -> list[Judged]:
        return [
            Judged(name, variant, case, None if n is None else score([4, 1], [4, 1], n), "a way")
            for case, n in zip(CASES, rights, strict=True)
        ]

    found = count_steps(
        [
            *judged("trainer", "weighted", [2, 2, 2, 2]),
            *judged("trainer", "cross", [2, 2, 1, 2]),
            *judged("torchvision", "", [1, 2, None, None]),
            *judged("torchvision", "all", [2, 2, 2, 2]),
            *judged("torchvision", "none", [None] * 4),
        ]
    )
    ours = against.titled("trainer")
    assert found[0] == Counted(f"{ours}, weighted", 8, 8, rival=ours)
    assert isinstance(found[1], Counted)
    assert found[1].broken
    name = against.titled("torchvision")
    assert found[2] == Counted(name, 3, 4, 4, "a way", name)
    assert isinstance(found[3], Counted)
    assert (found[3].right, found[3].ours, found[3].outcome) == (8, 7, "trainer loses")
    assert found[4] == Absent(f"{name}, none", "a way")
    assert best_rows(Part("accumulation", found)) == [found[3]]


def test_cuts_are_counted_by_variant() -> None:
    def judged(name: str, variant: str, same: bool) -> Judged:
        return Judged(name, variant, 7, resume.Score(9, 0, 0 if same else 1, 0.0, same), "a way")

    found = count_cuts(
        [judged("trainer", "", True)] * 2
        + [judged("torchvision", "a", True), judged("torchvision", "b", False)]
        + [judged("torchvision", "a", True), judged("torchvision", "b", True)]
    )
    assert [(row.right, row.of, row.ours) for row in found if isinstance(row, Counted)] == [
        (2, 2, None),
        (2, 2, 2),
        (1, 2, 2),
    ]
    part = Part("resume", found)
    assert outcomes([part], "equal") == [(part, found[1])]
    assert outcomes([part], "trainer wins") == []


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no library is installed."""
    monkeypatch.setattr(against, "LIBRARIES", {name: f"no-such-{name}" for name in against.LIBRARIES})


@pytest.mark.usefixtures("alone")
def test_steps_and_cuts_of_the_trainer() -> None:
    steps, cuts = by_accumulation(None), by_resume(QUICK)
    assert [(row.right, row.of) for row in steps.rows if isinstance(row, Counted)] == [(8, 8), (8, 8)]
    assert [(row.right, row.of) for row in cuts.rows if isinstance(row, Counted)] == [(1, 1)]
    for part in (steps, cuts):
        assert part.measured
        assert not part.failures
        json.dumps(part.raw)


@pytest.mark.usefixtures("alone")
def test_the_loops_by_hand_are_always_there() -> None:
    part = by_overhead(QUICK._replace(rounds=1, steps=5))
    assert [row.against for row in part.rows] == [
        *("by hand", "by hand, lean", "lightning", "fabric", "accelerate", "ignite")
    ]
    assert [len(series) for series in part.raw.values()] == [1, 1, 1]


@pytest.mark.slow
def test_images_are_loaded_in_earnest() -> None:
    part = by_loader(QUICK._replace(epochs=1))
    compared = [row for row in part.rows if isinstance(row, Timed) and row.against.startswith("torchvision")]
    assert [row.ours for row in compared] == list(loader.TARGETS)
    assert all(row.ratio > 0 for row in compared)  # who is faster is this machine's matter
    assert not part.failures
