"""Promise: `benchmarks setting --runs` compares whole runs, in turn and in processes of their own."""

import subprocess
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import whole_runs
from benchmarks.setting import bench_setting
from benchmarks.whole_runs import Figures, bench_whole_runs, figures
from tests.helpers import preloaded
from trainer.errors import BadInputError


def test_sides_take_turns_and_are_compared_pair_by_pair(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[str, ...]] = []

    def run(name: str, settings: Sequence[str]) -> Figures:
        assert name == "digits"
        seen.append(tuple(settings))
        drift = len(seen)  # the machine gets faster all the time: it must not decide
        if "memory.allocator=async" in settings:
            return Figures(150.0 * (drift - 1), {"reserved": 3.0})
        return Figures(100.0 * drift, {"reserved": 2.0})

    monkeypatch.setattr(whole_runs, "run", run)
    assert bench_whole_runs("digits", ["memory.allocator=async"], ["seed=3"], rounds=3, steps=7) == 0
    assert ["memory.allocator=async" in one for one in seen] == [False, True] * 3
    assert all("seed=3" in one and "max_steps=7" in one for one in seen)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-4] == "| setting | samples/s | ratio | 95 % interval | reserved, GiB |"
    assert lines[-2] == "| as it is | 300 |  |  | 2.00 |"
    assert lines[-1] == "| memory.allocator=async | 450 | 1.500 | 1.500 to 1.500 | 3.00 |"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are forks of the preloaded server; what they print on stderr goes where the test's own does."""

    def run(words: list[str], *, check: bool, **options: Any) -> "subprocess.CompletedProcess[str]":
        assert not check
        return preloaded.run(words, stderr=None, **options)

    module = SimpleNamespace(run=run, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(whole_runs, "subprocess", module)


@pytest.mark.usefixtures("quick")
def test_a_real_run() -> None:
    found = whole_runs.run("digits", ["max_steps=2", "evaluation.every=end", "parallel.threads=1"])
    assert found.samples_per_s > 0 and found.memory["resident"] > 0


@pytest.mark.usefixtures("quick")
def test_a_variable_reaches_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    settings = ["env:PYTORCH_ALLOC_CONF=backend:native", "memory.allocator=async"]
    with pytest.raises(BadInputError, match=r"env:PYTORCH_ALLOC_CONF=backend:native .* ended with code 2"):
        bench_whole_runs("digits", [], settings, rounds=1, steps=1)
    assert "PYTORCH_ALLOC_CONF=backend:native says otherwise" in capfd.readouterr().err


@pytest.mark.usefixtures("quick")
def test_a_run_that_fails_ends_it(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadInputError, match="ended with code 2: see above"):
        bench_whole_runs("digits", [], ["parallel.cpu_binding=core"], rounds=1, steps=1)
    assert "did you mean 'cores'" in capfd.readouterr().err


@pytest.mark.parametrize("setting", ["memory.allocator=async", "parallel.cpu_binding=cores"])
def test_what_is_of_a_process_is_not_timed_by_the_step(setting: str) -> None:
    with pytest.raises(BadInputError, match="add --runs"):
        bench_setting("digits", [setting], [], rounds=1, steps=1)


def test_figures_are_the_most_of_all_rows() -> None:
    rows: list[dict[str, Any]] = [
        {"kind": "train", "memory/reserved_bytes": 3 << 30, "gpu/memory_bytes": 5 << 30},
        {"kind": "memory", "memory/reserved_bytes": 4 << 30},
        {"kind": "end", "samples_per_s": 12.5},
    ]
    assert figures(rows) == Figures(12.5, {"reserved": 4.0, "used on the GPU": 5.0})
