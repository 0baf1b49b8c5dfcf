"""Promise: what whole runs cost outside of their steps is measured for each kind of growth."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import growth_runs
from benchmarks.growth_runs import KINDS, measure_runs


def test_each_kind_has_a_line_before_and_after_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Sequence[str]]()

    def run(words: Sequence[str]) -> tuple[float, float, float]:
        asked.append(words)
        return 4.0 - len(asked) % 2, 1.0, 8.0 + len(asked) % 2

    monkeypatch.setattr(growth_runs, "_run", run)
    grown = measure_runs(2, 100)
    assert [line.what for line in grown[:2]] == ["steps, to the first step", "steps, after it"]
    assert list(grown[0].points) == [(10, 3.0, 9.0), (100, 3.0, 9.0)]
    assert [point.seconds for point in grown[1].points] == [1.0, 1.0]
    assert len(grown) == 2 * len(KINDS) and len(asked) == 2 * sum(len(line.points) for line in grown[::2])


def test_files_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth_runs, "_LINKS", 3)
    KINDS["classes"].prepare(tmp_path, 5)
    for split in ("train", "val"):
        assert len(list((tmp_path / split).iterdir())) == 5
        assert len(list((tmp_path / split).glob("*/*.png"))) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train", "val"]


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_run_of_each_kind(name: str) -> None:
    least = KINDS[name].amounts[0]
    grown = measure_runs(1, least, [name])
    assert all(line.points[0].seconds > 0 for line in grown)
