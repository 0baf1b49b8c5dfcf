"""Promise: a start imports only what it needs, once; the time of each of its phases is reported."""

import sys

import pytest

from benchmarks import start
from benchmarks.__main__ import main
from benchmarks.start import Pair, one_start, read_marks, two_ranks
from tests.helpers.luck import forked_or_skipped
from tests.helpers.tables import table_rows

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
