"""Promise: `benchmarks scoreboard` writes all its files or none, and says what failed, by its code too."""

import json
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import tokens
from benchmarks.__main__ import main
from benchmarks.scoreboard import benches
from benchmarks.scoreboard.bench import bench_scoreboard
from benchmarks.scoreboard.benches import BENCHES, QUICK, measured_apart
from benchmarks.scoreboard.common import Extent
from benchmarks.scoreboard.figures import (
    BUSY,
    QUIET,
    Absent,
    Counted,
    Part,
    timed,
)
from tests.helpers.scoreboard_parts import (
    FAILED,
    LOST,
    MISSING,
    OVERHEAD,
    PARTS,
    WON,
    rows,
)
from trainer.errors import BadInputError

Fake = Callable[[str, Any, Path | None], Part]


def answering(*parts: Part) -> Fake:
    by_name = {part.name: part for part in parts}
    return lambda name, _, __: by_name[name]


@pytest.mark.usefixtures("at_once")
def test_both_files_are_written_and_the_rest_of_what_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "board.json"
    only = "overhead,accumulation,resume"
    code = bench_scoreboard(only=only, out=file, measure=answering(*PARTS))
    assert code == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["board.json", "board.svg"]
    ElementTree.parse(tmp_path / "board.svg")
    written = json.loads(file.read_text())
    assert written["command"] == f"python -m benchmarks scoreboard --only {only} --out {file}"
    assert [part["failed"] for part in written["benches"]] == ["", "", FAILED.failed]
    captured = capsys.readouterr()
    assert "**trainer loses**" in captured.out and FAILED.failed in captured.out
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "overhaed"], "did you mean 'overhead'? (there are: overhead, loader, tokens"),
        (["--out", "nowhere/board.json"], "there is no folder nowhere; make it first"),
        (["--out", "board.txt"], "give a file that ends in .json"),
        (["--out", "taken.json"], "taken.svg: that is a folder"),
        (["--out", "shut/a.json"], "nothing can be written into shut"),
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
    file = tmp_path / "board.json"

    def here(name: str, extent: Extent, timm_train: Path | None) -> Part:
        return benches._measure(name, extent._replace(batches=10, megabytes=1), timm_train)

    assert bench_scoreboard(quick=True, only="tokens", out=file, measure=here) == 0
    captured = capsys.readouterr()
    (row,) = rows(captured.out, BENCHES["tokens"].title)
    assert row[:2] == ["trainer, no workers", tokens.NANOGPT]
    found = json.loads(file.read_text())["benches"][0]
    ours, theirs = found["raw"].values()
    assert len(ours) == len(theirs) == QUICK.token_rounds and min(*ours, *theirs) > 0
    # Who wins is this machine's matter; the page says what these figures and the load beside them come to.
    wanted = timed(row[0], row[1], ours, theirs)
    assert row[4:6] == [f"{wanted.ratio:.3f}", f"{wanted.low:.3f} to {wanted.high:.3f}"]
    assert len(found["shares"]) == 2
    decided = str(wanted.outcome).replace("trainer loses", "**trainer loses**")
    assert row[-1] == (decided if min(found["shares"]) >= QUIET else BUSY)
    assert "measuring tokens, 1 of 1" in captured.err
