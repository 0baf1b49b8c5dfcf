"""Promise: the scoreboard says who wins and who loses, leaves nobody out, and says what failed."""

import json
import multiprocessing
import os
import pickle
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, strategies as st
from matplotlib.text import Text

from benchmarks import accumulation, against, loader, resume, tokens
from benchmarks.__main__ import main
from benchmarks.accumulation import CASES
from benchmarks.against import LibraryFailed, NotMeasured, blamed
from benchmarks.charts import as_svg
from benchmarks.pipelines import Epoch
from benchmarks.scoreboard import benches, quiet, timed as timed_parts
from benchmarks.scoreboard.bench import bench_scoreboard, check_files, write_all
from benchmarks.scoreboard.benches import BENCHES, FULL, QUICK, measured_apart
from benchmarks.scoreboard.chart import chart
from benchmarks.scoreboard.common import Extent, libraries_for
from benchmarks.scoreboard.counted import by_accumulation, by_resume, count_cuts, count_steps
from benchmarks.scoreboard.figures import (
    BUSY,
    NOT_BEST,
    QUIET,
    Absent,
    Counted,
    Machine,
    Part,
    Timed,
    best_rows,
    between,
    outcomes,
    timed,
    without_the_failing,
)
from benchmarks.scoreboard.quiet import share_of_cpus
from benchmarks.scoreboard.show import as_json, command_line, document, summary, text
from benchmarks.scoreboard.timed import by_loader, by_overhead
from trainer.commands.bench.paired import median_interval, values_outside
from trainer.errors import BadInputError
from trainer.observe.text import DASH
from trainer.train.step import train_step

MACHINE = Machine("2026-11-22, a processor", "quick 1.0, slow not installed")
WON = Timed("trainer 1", "slow 2.0", 100.0, 200.0, 0.5, 0.45, 0.55, 60)
LOST = Timed("trainer 1", "quick 1.0", 100.0, 80.0, 1.25, 1.21, 1.29, 60)
OPEN = Timed("trainer 1", "alike 3.0", 100.0, 101.0, 0.99, 0.97, 1.01, 60)
MISSING = Absent("nowhere", "not installed")
OVERHEAD = Part("overhead", [WON, LOST, OPEN, MISSING], "sixty rounds", {"trainer 1": [1.0, 2.0]}, seconds=9)
COUNTED = Part(
    "accumulation",
    [
        Counted("trainer 1", 8, 8),
        Counted("slow 2.0", 2, 8, 8),
        Counted("alike 3.0", 4, 4, 4, "not measured: the other four"),
        Absent("timm 1.0", "not measured: its train.py isn't in its wheel"),
    ],
    "seven micro-batches",
)
FAILED = Part("resume", failed="RuntimeError: it fell | over")
PARTS = (OVERHEAD, COUNTED, FAILED)


def words(parts: Sequence[Part]) -> list[str]:
    """What is written in the chart."""
    texts = chart("title", parts).findobj(Text)
    return [one.get_text() for one in texts if isinstance(one, Text)]


def rows(page: str, title: str) -> list[list[str]]:
    """Cells of a section's table, without its head."""
    section = page[page.index(f"## {title}\n") + 3 :].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


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


def test_a_loser_is_shown_as_a_loser() -> None:
    page = document(PARTS, MACHINE, "python -m benchmarks scoreboard --out a.md", "a")
    table = rows(page, BENCHES["overhead"].title)
    assert [row[-1] for row in table] == ["trainer wins", "**trainer loses**", "undecided", "not installed"]
    assert table[1] == ["trainer 1", "quick 1.0", "100", "80", "1.250", "1.210 to 1.290", "**trainer loses**"]
    assert rows(page, "Who wins")[0] == ["overhead", "1", "1", "0", "1"]
    assert "- **The trainer loses 1:** overhead against quick 1.0 (trainer 1: 1.250" in page
    assert "loses nowhere" not in page
    assert "The trainer loses nowhere here" in summary([COUNTED])


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


def test_nobody_is_left_out() -> None:
    page = document(PARTS, MACHINE, "python -m benchmarks scoreboard --out a.md", "a")
    assert [DASH, "nowhere", DASH, DASH, DASH, DASH, "not installed"] in rows(page, BENCHES["overhead"].title)
    counted = rows(page, BENCHES["accumulation"].title)
    assert counted[0] == ["trainer 1", "8 of 8", DASH, ""]
    assert counted[1] == ["slow 2.0", "2 of 8", "8 of 8", "trainer wins"]
    assert counted[2] == ["alike 3.0", "4 of 4", "4 of 4", "equal. not measured: the other four"]
    assert counted[3] == ["timm 1.0", DASH, DASH, "not measured: its train.py isn't in its wheel"]
    assert "- Not measured: overhead against nowhere; accumulation against timm 1.0." in page
    assert "- Left out by `--only`: loader, tokens." in page


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


@pytest.mark.usefixtures("at_once")
def test_what_a_machine_cannot_measure_is_no_failure() -> None:
    lacking = Part("loader", lacking="this machine has no /proc")
    assert not lacking.failures
    assert not lacking.measured
    page = text([lacking, OVERHEAD], MACHINE)
    assert "ailed" not in page
    assert "- Not measured: loader: this machine has no /proc." in page
    assert f"## {BENCHES['loader'].title}\n\nNot measured: this machine has no /proc\n" in page
    assert "not measured: this machine has no /proc" in words([lacking])
    assert json.loads(as_json([lacking], MACHINE, "x"))["benches"][0]["lacking"] == lacking.lacking
    measure = {"loader": lacking, "overhead": OVERHEAD}
    assert bench_scoreboard(only="loader,overhead", measure=lambda name, _, __: measure[name]) == 0


def test_the_page_says_what_it_needs_to_be_refuted() -> None:
    page = document(PARTS, MACHINE, "python -m benchmarks scoreboard --out a.md", "a")
    beside = ("`python -m benchmarks scoreboard --out a.md`", "(a.svg)", "(a.json)")
    for words in (MACHINE.conditions, MACHINE.libraries, *beside):
        assert words in page
    root = Path(__file__).parents[2]
    loops = rows(page, "How to refute it")
    assert [row[1] for row in loops if row[0] == "overhead"] == [
        "lightning",
        "fabric",
        "accelerate",
        "ignite",
    ]
    for _, library, loop, settings in loops:
        function, _, file = loop.replace("`", "").partition(" in ")
        assert f"def {function}(" in (root / file).read_text()
        assert library in file
        assert len(settings) > 20


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


@pytest.mark.parametrize(
    "nothing",
    [
        [],
        [FAILED],
        [replace(OVERHEAD, rows=[OPEN])],
        [replace(OVERHEAD, rows=[MISSING])],
        [replace(OVERHEAD, rows=[replace(WON, apart="shrunk")])],
        [replace(COUNTED, rows=COUNTED.rows[:1])],
    ],
    ids=["nothing", "failed", "undecided", "missing", "apart", "alone"],
)
def test_who_was_compared_with_nobody_loses_nowhere_isnt_said(nothing: list[Part]) -> None:
    assert "nowhere" not in summary(nothing).replace("against nowhere", "")
    assert "- Nothing is decided here." in summary(nothing)


def test_the_plot_shows_all_of_it() -> None:
    drawn = chart("title", PARTS)
    shown = words(PARTS)
    for part in PARTS:
        assert part.name in shown
        for row in part.rows:
            assert any(row.against in word for word in shown)
    assert any("trainer loses" in word for word in shown)
    assert any("it fell" in word for word in shown)
    dots = [
        float(np.asarray(line.get_xdata())[0]) for line in drawn.axes[0].lines if line.get_marker() == "o"
    ]
    assert dots == [row.ratio for row in PARTS[0].rows if isinstance(row, Timed)]
    file = as_svg(drawn)
    assert file == as_svg(chart("title", PARTS))
    there = {
        "".join(one.itertext())
        for one in ElementTree.fromstring(file).iter("{http://www.w3.org/2000/svg}text")
    }
    assert {word for word in shown if "\n" not in word} <= there | {""}


def test_the_figures_hold_everything() -> None:
    found = json.loads(as_json(PARTS, MACHINE, "the command"))
    assert found["command"] == "the command"
    assert found["benches"][0]["quiet"] is True
    assert found["benches"][0]["raw"] == {"trainer 1": [1.0, 2.0]}
    assert [row["outcome"] for row in found["benches"][0]["rows"]][1] == "trainer loses"
    assert found["benches"][0]["rows"][1]["ratio"] == 1.25
    assert found["benches"][2]["failed"] == FAILED.failed


def score(cut: list[int], due: list[int], right: int) -> accumulation.Score:
    return accumulation.Score(cut, due, 0.0, [], right == len(due), right)


def test_steps_are_compared_on_the_cases_that_both_did() -> None:
    def judged(name: str, variant: str, rights: Sequence[int | None]) -> list[accumulation.Judged]:
        return [
            accumulation.Judged(name, variant, case, None if n is None else score([4, 1], [4, 1], n), "a way")
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
    def judged(name: str, variant: str, same: bool) -> resume.Judged:
        return resume.Judged(name, variant, 7, resume.Score(9, 0, 0 if same else 1, 0.0, same), "a way")

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
    assert all(0 < row.ratio < 1.5 for row in compared)
    assert not part.failures


# The command.

Fake = Callable[[str, Any, Path | None], Part]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It isn't asked whether the machine is quiet, which takes two seconds."""
    monkeypatch.setattr(quiet, "share_of_cpus", lambda: 1.0)


def answering(*parts: Part) -> Fake:
    by_name = {part.name: part for part in parts}
    return lambda name, _, __: by_name[name]


@pytest.mark.usefixtures("at_once")
def test_three_files_are_written_and_the_rest_of_what_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, figures = tmp_path / "board.md", tmp_path / "all.json"
    only = "overhead,accumulation,resume"
    code = bench_scoreboard(only=only, out=page, json=figures, measure=answering(*PARTS))
    assert code == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        *("all.json", "board.json", "board.md", "board.svg")
    ]
    assert figures.read_text() == (tmp_path / "board.json").read_text()
    ElementTree.parse(tmp_path / "board.svg")
    written = page.read_text()
    assert f"`python -m benchmarks scoreboard --only {only} --out {page} --json {figures}`" in written
    assert "**trainer loses**" in written
    assert FAILED.failed in written
    captured = capsys.readouterr()
    assert "**trainer loses**" in captured.out
    assert "measuring accumulation, 2 of 3" in captured.err


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    ("part", "code"),
    [
        (OVERHEAD, 0),
        (replace(OVERHEAD, rows=[LOST]), 0),
        (replace(OVERHEAD, rows=[MISSING]), 3),
        (replace(OVERHEAD, rows=[]), 3),
        (replace(OVERHEAD, rows=[Counted("trainer", 0, 0)]), 3),
        (replace(OVERHEAD, rows=[WON, Absent("a", "failed: b", failed=True)]), 1),
        (replace(OVERHEAD, rows=[Counted("trainer", 1, 2)]), 1),
        (Part("overhead", failed="gone"), 1),
        (Part("overhead", lacking="no /proc"), 3),
    ],
    ids=["measured", "lost", "missing", "empty", "none", "library", "broken", "failed", "lacking"],
)
def test_exit_codes(part: Part, code: int) -> None:
    assert bench_scoreboard(only="overhead", measure=answering(part)) == code


def test_each_timed_part_is_looked_at_before_and_after(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shares = iter([0.99, 0.98, 0.97, 0.5])
    seen: list[str] = []

    def share() -> float:
        seen.append("looked")
        return next(shares)

    def measure(name: str, _: Any, __: Any) -> Part:
        seen.append(name)
        return replace(OVERHEAD if BENCHES[name].timed else COUNTED, name=name)

    monkeypatch.setattr(quiet, "share_of_cpus", share)
    assert bench_scoreboard(only="overhead,tokens,resume", measure=measure) == 0
    assert seen == ["looked", "overhead", "looked", "looked", "tokens", "looked", "resume"]
    out = capsys.readouterr().out
    assert rows(out, "Who wins")[:2] == [["overhead", "1", "1", "0", "1"], ["tokens", "0", "0", "0", "3"]]
    assert "**Other work ran beside tokens:" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "overhaed"], "did you mean 'overhead'? (there are: overhead, loader, tokens"),
        (["--out", "nowhere/board.md"], "there is no folder nowhere; make it first"),
        (["--json", "nowhere/board.json"], "there is no folder nowhere; make it first"),
        (["--out", "board.txt"], "give a file that ends in .md"),
        (["--out", "taken.md"], "taken.svg: that is a folder"),
        (["--out", "a.md", "--json", "a.md"], "--json a.md: --out writes the page or its plot there"),
        (["--out", "a.md", "--json", "../here/a.svg"], "a.svg: --out writes the page or its plot there"),
        (["--out", "shut/a.md"], "--out shut/a.md: nothing can be written into shut"),
        (["--json", "shut/a.json"], "--json shut/a.json: nothing can be written into shut"),
        (["--timm-train", "train.py"], "there is no file train.py"),
        (["--timm-train", "there.py", "--only", "tokens"], "only read by accumulation"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_measured(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = tmp_path / "here"
    for folder in (here, here / "taken.svg", here / "shut"):
        folder.mkdir()
    monkeypatch.chdir(here)
    (here / "there.py").touch()
    original = os.access  # root may write anywhere
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "shut" and original(path, mode))
    monkeypatch.setattr(benches, "measured_apart", lambda *_: 1 / 0)
    assert main(["scoreboard", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert captured.out == ""


def test_nothing_is_replaced_before_all_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / "a.md", tmp_path / "a.svg"]
    for file in files:
        file.write_text("old")
    original = Path.write_text

    def full(self: Path, *arguments: Any, **keywords: Any) -> int:
        if "svg" in self.name:
            raise OSError(28, "No space left on device", str(self))
        return original(self, *arguments, **keywords)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(BadInputError, match="No space left") as failed:
        write_all(dict.fromkeys(files, "new"))
    assert str(failed.value).startswith(f"{files[1]}: can't be written")
    assert [file.read_text() for file in files] == ["old", "old"]
    assert len(list(tmp_path.iterdir())) == 2


def test_the_figures_may_be_asked_for_where_they_lie_anyway(tmp_path: Path) -> None:
    check_files(tmp_path / "a.md", tmp_path / "a.json", None)


def killed(*_: Any) -> Part:
    os._exit(9)


def test_a_bench_that_fails_or_dies_is_a_part_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = BENCHES["tokens"]._replace(measure=lambda *_: json.loads("{}")["key"])
    monkeypatch.setitem(BENCHES, "tokens", bench)
    assert benches._measure("tokens", QUICK, None) == Part("tokens", failed="KeyError: 'key'")

    def too_few(*_: Any) -> Part:
        raise BadInputError("no photographs")

    monkeypatch.setitem(BENCHES, "tokens", bench._replace(measure=too_few))
    assert benches._measure("tokens", QUICK, None) == Part("tokens", lacking="no photographs")
    monkeypatch.setattr(benches, "_measure", killed)
    fork = multiprocessing.get_context("fork")  # it computes nothing here, and imports nothing anew
    monkeypatch.setattr(benches, "multiprocessing", SimpleNamespace(get_context=lambda _: fork))
    died = measured_apart("tokens", QUICK, None)
    assert "ended before it answered" in died.failed
    assert died.seconds > 0


@pytest.mark.usefixtures("at_once")
def test_the_cheapest_part_in_earnest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "board.md"

    def here(name: str, extent: Extent, timm_train: Path | None) -> Part:
        return benches._measure(name, extent._replace(batches=10, megabytes=1), timm_train)

    assert bench_scoreboard(quick=True, only="tokens", out=page, measure=here) == 0
    (row,) = rows(page.read_text(), BENCHES["tokens"].title)
    assert row[:2] == ["trainer, no workers", tokens.NANOGPT]
    found = json.loads(page.with_suffix(".json").read_text())["benches"][0]
    ours, theirs = found["raw"].values()
    assert len(ours) == len(theirs) == QUICK.token_rounds and min(*ours, *theirs) > 0
    # Who wins is this machine's matter; the page says what these figures and the load beside them come to.
    wanted = timed(row[0], row[1], ours, theirs)
    assert row[4:6] == [f"{wanted.ratio:.3f}", f"{wanted.low:.3f} to {wanted.high:.3f}"]
    assert len(found["shares"]) == 2
    decided = str(wanted.outcome).replace("trainer loses", "**trainer loses**")
    assert row[-1] == (decided if min(found["shares"]) >= QUIET else BUSY)
    assert "measuring tokens, 1 of 1" in capsys.readouterr().err


def test_the_share_of_the_cpus() -> None:
    assert 0 < share_of_cpus(0.05) <= 1
    assert Part("tokens", shares=(0.95, 0.91)).quiet
    assert not Part("tokens", shares=(0.95, 0.85)).quiet


def test_enough_rounds_to_decide() -> None:
    for extent in (QUICK, FULL):
        assert min(extent.rounds, extent.epochs, extent.token_rounds) >= 6
    assert outcomes([OVERHEAD], "trainer loses") == [(OVERHEAD, LOST)]


def test_the_command_is_what_was_asked() -> None:
    given = {"quick": True, "only": "", "out": Path("a b.md"), "json": None}
    assert command_line(given) == "python -m benchmarks scoreboard --quick --out 'a b.md'"
