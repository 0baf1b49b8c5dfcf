"""Promise: a start imports only what it needs, once; the time of each of its phases is reported."""

import _thread
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import start
from benchmarks.__main__ import main
from benchmarks.start import Pair, one_start, read_marks, two_ranks
from tests.helpers.luck import forked_or_skipped
from tests.helpers.tables import table_rows
from tests.helpers.toys import make_recipe
from tests.helpers.waiting import until
from trainer.host.affinity import CpuShares
from trainer.launch import forked
from trainer.launch.launcher import LocalRanks
from trainer.train.start import resolve as starting

# Seen with torch 2.9.1: 1,396 and 1,751. TensorBoard's writer is 320 of them; torch's compiler has 830.
MOST_MODULES = (1500, 1900)

MARKS = """began 7 0.1 9.0 100.1 50
validated 7 0.5 9.0 100.5 400
imported 7 2.0 9.0 102.0 1300
data 7 2.25 9.0 102.3 1310
launched 7 2.5 9.0 102.6 1320
imported 8 0.0 2.5 102.7 1320
model 8 0.5 2.5 103.5 1330
stepped 8 1.5 2.75 104.5 1700"""


def test_a_start_is_one_interpreter_with_few_modules() -> None:
    """A start as a user has it; the rank is a fork of its launcher."""
    starts = list[start.Start]()

    def one() -> bool:
        starts.append(one_start())
        return starts[-1].interpreters == 1

    forked_or_skipped(one)
    found = starts[-1]
    assert all(few <= most for few, most in zip(found.modules, MOST_MODULES, strict=True)), found.modules


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is forked")
def test_two_ranks_are_one_interpreter_too() -> None:
    """Forks of one that has imported torch: when they begin to train, they have what the launcher had."""
    pairs = list[Pair]()

    def two() -> bool:
        pairs.append(two_ranks())
        return pairs[-1].interpreters == 1

    forked_or_skipped(two)
    found = pairs[-1]
    assert len(found.first_imported) == 2
    assert all(MOST_MODULES[0] / 2 < count < MOST_MODULES[0] for count in found.first_imported.values()), (
        found
    )


def test_phases_are_between_the_marks() -> None:
    found = read_marks(MARKS.splitlines(), 99.5)
    assert list(found.phases.values()) == [0.5, 1.5, 0.25, 0.25, 0.0, 0.5, 1.0, 0.25]
    assert (found.seconds, found.modules, found.interpreters) == (5.0, (1320, 1700), 1)


@pytest.mark.parametrize(("script", "code"), [(4.0, 0), (3.0, 1)])
def test_the_ratio_is_to_the_script_that_imports_no_more(
    script: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start, "one_start", lambda *_: read_marks(MARKS.splitlines(), 99.5))
    monkeypatch.setattr(start, "two_ranks", lambda: Pair(8.0, 1, {}))
    monkeypatch.setattr(start, "prepare", lambda _: None)
    monkeypatch.setattr(start, "cpu_seconds", lambda words, **_: 9.0 if words[2:] == ["adamw"] else script)
    assert main(["start", "--rounds", "2"]) == code
    text = capsys.readouterr().out
    ratio = f"{4.25 / script:.2f}"
    assert f"| **ratio** (target: 1.2) | {ratio} | {ratio} | {ratio} |" in text
    assert [row[1] for row in table_rows(text)][-3:] == [
        f"{script:.2f} ({script:.2f} to {script:.2f})",
        "8.00 (8.00 to 8.00)",
        f"{2 * script:.2f} ({2 * script:.2f} to {2 * script:.2f})",
    ]


def test_whose_rank_may_be_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that computed with nothing yet, and without a GPU; a user's code must have opened nothing, too."""
    asked = list[bool]()

    def can_fork(_: forked.Footprint, *, files: bool) -> bool:
        asked.append(files)
        return True

    monkeypatch.setattr(starting, "can_fork", can_fork)
    monkeypatch.setattr(starting, "device_kind", lambda recipe: recipe.device.replace("auto", "cpu"))
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    before, local = forked.footprint(), LocalRanks(1, 1)
    assert starting._may_fork(make_recipe(), before, local)
    assert starting._may_fork(make_recipe(log={"to": ["jsonl", "mine.py:sink"]}), before, local)
    assert starting._may_fork(make_recipe(hooks={"use": ["mine.py:hook"]}), before, local)
    assert starting._may_fork(make_recipe(task="mine.py"), before, local)
    assert asked == [False, False, True, True]
    bound = CpuShares((frozenset({0}),))
    assert starting._may_fork(make_recipe(), before, LocalRanks(1, 1, cpus=bound))
    pinned = replace(bound, pinned=True)
    assert not starting._may_fork(make_recipe(), before, LocalRanks(1, 1, cpus=pinned))
    assert not starting._may_fork(make_recipe(device="cuda"), before, local)
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    assert not starting._may_fork(make_recipe(), before, local)


def test_what_does_not_come_through_a_fork(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # a test runner has some of its own
    before = forked.footprint()
    assert before.threads and len(before.files) > 2
    assert forked.can_fork(before, files=True)
    with (tmp_path / "left-open").open("w"):
        assert not forked.can_fork(before, files=True)
        assert forked.can_fork(before, files=False)
    ends = threading.Lock()
    with ends:  # a library's thread, where one of OpenBLAS's has ended
        _thread.start_new_thread(ends.acquire, ())
        until(lambda: len(forked.footprint().threads) > len(before.threads))
        ended = before._replace(threads=before.threads | {"1", "2"})
        assert not forked.can_fork(ended, files=False)
    until(lambda: forked.footprint().threads <= before.threads)
    last = threading.Lock()  # kept by a thread that Python has joined, and that has instructions to go
    last.acquire()
    _thread.start_new_thread(last.acquire, ())
    until(lambda: len(forked.footprint().threads) > len(before.threads))

    def end(_: str) -> str:
        if forked.footprint().threads - before.threads:
            last.release()
            until(lambda: forked.footprint().threads <= before.threads)
        return "7 (python) R 1"

    monkeypatch.setattr(forked, "text_of", end)
    assert forked.can_fork(before, files=False)
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    assert not forked.can_fork(before, files=False)
