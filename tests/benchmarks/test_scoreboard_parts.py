"""Promise: the scoreboard counts or times all libraries alike; a library that fails has a row."""

import json
import pickle
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import accumulation, against, loader, resume
from benchmarks.accumulation import CASES
from benchmarks.against import Judged, LibraryFailed, NotMeasured, blamed
from benchmarks.pipelines import Epoch
from benchmarks.scoreboard import timed as timed_parts
from benchmarks.scoreboard.benches import QUICK
from benchmarks.scoreboard.common import libraries_for
from benchmarks.scoreboard.counted import by_accumulation, by_resume, count_cuts, count_steps
from benchmarks.scoreboard.figures import (
    Absent,
    Counted,
    Part,
    Timed,
    best_rows,
    outcomes,
    without_the_failing,
)
from benchmarks.scoreboard.show import text
from benchmarks.scoreboard.timed import by_loader, by_overhead
from tests.helpers.scoreboard_parts import (
    MACHINE,
)
from trainer.errors import BadInputError
from trainer.train.step import train_step


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


def test_what_the_device_does_is_added_to_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a library that fails is left out of the next try, with a row."""
    tried = []

    def measure(_: Path, __: Path, libraries: list[str], rounds: int, ___: int) -> loader.LoadTimes:
        tried.append(list(libraries))
        if "timm" in libraries:
            raise LibraryFailed("timm", "ImportError: no such thing")
        theirs = tuple(Epoch(100.0 + number, 9.0) for number in range(rounds))
        ours = tuple(Epoch(100.0, 9.0, 50.0 + 1.5 * number) for number in range(rounds))
        there = {name: loader.Pipeline(ours, 1.0) for name in loader.TARGETS}
        return loader.LoadTimes({**there, **{name: loader.Pipeline(theirs, 1.0) for name in libraries}})

    monkeypatch.setattr(loader, "measure_loading", measure)
    monkeypatch.setattr(against, "LIBRARIES", dict.fromkeys(against.LIBRARIES, "torch"))
    monkeypatch.setattr(timed_parts, "write_photographs", lambda *_: None)
    monkeypatch.setattr(loader, "about", lambda *_: "images")
    part = by_loader(QUICK)
    assert [len(names) for names in tried] == [3, 2]
    compared = [row for row in part.rows if isinstance(row, Timed)]
    assert len(compared) == 6
    assert {row.ratio for row in compared} == {1.5}
    assert [row.ours for row in best_rows(part) if isinstance(row, Timed)] == ["trainer"] * 2
    assert len(outcomes([part], "trainer loses")) == 2
    assert text([part], MACHINE).count("| images shrunk beforehand: not compared |") == 4
    assert [row.why for row in part.rows if isinstance(row, Absent)] == ["failed: ImportError: no such thing"]
    assert part.failures
    json.dumps(part.raw)


def test_a_library_that_fails_is_named() -> None:
    with pytest.raises(LibraryFailed, match="ignite: KeyError: 'a'"), blamed("ignite"):
        raise KeyError("a")
    for own in (NotMeasured("no file"), BadInputError("give another")):
        with pytest.raises(type(own)), blamed("ignite"):
            raise own
    with pytest.raises(LibraryFailed, match=r"^timm: why$"), blamed("ignite"):
        raise LibraryFailed("timm", "why")
    again = pickle.loads(pickle.dumps(LibraryFailed("ignite", "why")))
    assert (again.name, str(again)) == ("ignite", "ignite: why")

    def measure(names: list[str]) -> str:
        if "b" in names:
            raise LibraryFailed("b", "why")
        return "".join(names)

    assert without_the_failing(measure, ["a", "b", "c"], LibraryFailed) == ("ac", {"b": "why"})

    def ours(_: list[str]) -> str:
        raise LibraryFailed("trainer", "why")

    with pytest.raises(LibraryFailed):
        without_the_failing(ours, ["a"], LibraryFailed)


def test_a_library_that_is_not_installed_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(against, "LIBRARIES", {name: f"no-such-{name}" for name in against.LIBRARIES})
    there, missing = libraries_for("resume")
    assert there == {}
    assert missing == [Absent("lightning", "not installed"), Absent("accelerate", "not installed")]


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


def test_a_script_that_crashes_leaves_the_others_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {name: "torch" if name == "timm" else f"no-such-{name}" for name in against.LIBRARIES}
    monkeypatch.setattr(against, "LIBRARIES", here)
    script = tmp_path / "train.py"
    script.touch()
    crashed = subprocess.CompletedProcess((), 1, "", "a line\nno such flag\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: crashed)
    part = by_accumulation(script)
    assert [row.right for row in part.rows if isinstance(row, Counted)] == [8, 8]
    (failed,) = (row for row in part.rows if isinstance(row, Absent) and row.failed)
    assert failed.against == against.titled("timm")
    assert "no such flag" in failed.why
    assert part.failures


@pytest.mark.usefixtures("alone")
def test_wrong_steps_of_the_trainer_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_only(run: Any, batches: Any, step: int) -> None:
        train_step(run, batches, step)
        if step:
            run.state.optimizer._recorded.updates[-1][1].mul_(2)

    monkeypatch.setattr(accumulation, "train_step", first_only)
    part = by_accumulation(None)
    assert [(row.right, row.of) for row in part.rows if isinstance(row, Counted)] == [(4, 8), (4, 8)]
    assert part.failures


@pytest.mark.usefixtures("alone")
def test_the_loops_by_hand_are_always_there() -> None:
    part = by_overhead(QUICK._replace(rounds=1, steps=5))
    assert [row.against for row in part.rows] == [
        *("by hand", "by hand, lean", "lightning", "fabric", "accelerate", "ignite")
    ]
    assert [len(series) for series in part.raw.values()] == [1, 1, 1]


def test_each_round_begins_with_another_one() -> None:
    names = ["a", "b", "c"]
    assert ["".join(loader.rotated(names, number)) for number in range(4)] == ["abc", "bca", "cab", "abc"]


@pytest.mark.slow
def test_images_are_loaded_in_earnest() -> None:
    part = by_loader(QUICK._replace(epochs=1))
    compared = [row for row in part.rows if isinstance(row, Timed) and row.against.startswith("torchvision")]
    assert [row.ours for row in compared] == list(loader.TARGETS)
    assert all(row.ratio > 0 for row in compared)  # who is faster is this machine's matter
    assert not part.failures
