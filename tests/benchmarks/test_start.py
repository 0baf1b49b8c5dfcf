"""Promise: a start imports only what it needs, once; the time of each of its phases is reported."""

import pytest

from benchmarks import start
from benchmarks.__main__ import main
from benchmarks.start import Pair, one_start, read_marks
from tests.helpers.tables import table_rows

# Seen with torch 2.9.1: 362 and 1,743. TensorBoard's writer is 320 of them; torch's compiler has 830.
MOST_MODULES = (450, 1900)

MARKS = """began 7 0.1 9.0 100.1 50
validated 7 0.5 9.0 100.5 300
imported 7 0.75 9.0 100.8 350
launched 7 1.0 9.0 101.1 360
began 8 0.0 1.0 101.2 50
imported 8 1.5 1.0 102.7 1320
data 8 1.75 1.0 103.0 1325
prepared 8 2.0 1.0 103.2 1325
model 8 2.5 1.0 103.5 1330
stepped 8 3.25 1.25 104.5 1700"""


def test_a_start_is_two_interpreters_with_few_modules() -> None:
    """A start as a user has it: the launcher has no torch, and one rank imports it."""
    found = one_start()
    assert found.interpreters == 2
    assert all(few <= most for few, most in zip(found.modules, MOST_MODULES, strict=True)), found.modules


def test_phases_are_between_the_marks() -> None:
    found = read_marks(MARKS.splitlines(), 99.5)
    assert list(found.phases.values()) == [0.5, 0.25, 0.25, 1.5, 0.25, 0.25, 0.5, 0.75, 0.25]
    assert (found.seconds, found.modules, found.interpreters) == (5.0, (360, 1700), 2)


@pytest.mark.parametrize(("script", "code"), [(4.5, 0), (4.0, 1)])
def test_the_ratio_is_to_the_script_that_imports_no_more(
    script: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start, "one_start", lambda *_: read_marks(MARKS.splitlines(), 99.5))
    monkeypatch.setattr(start, "two_ranks", lambda: Pair(7.0, 4, {}))
    monkeypatch.setattr(start, "prepare", lambda _: None)
    monkeypatch.setattr(start, "cpu_seconds", lambda words, **_: 9.0 if words[2:] == ["adamw"] else script)
    assert main(["start", "--rounds", "2"]) == code
    text = capsys.readouterr().out
    ratio = f"{4.5 / script:.2f}"
    assert f"| **ratio** (target: 1) | {ratio} | {ratio} | {ratio} |" in text
    assert [row[1] for row in table_rows(text)][-3:] == [
        "7.00 (7.00 to 7.00)",
        f"{script:.2f} ({script:.2f} to {script:.2f})",
        f"{7.0 / script:.2f}",
    ]
