"""Promise: each claim of the guides has a row, which says "holds" only where the figures bear it out."""

import json
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.claims import measuring, run as runs
from benchmarks.claims.catalogue import ABLATIONS
from benchmarks.claims.claim import Claim, Measured, Row, Source, compare, judge
from benchmarks.claims.measuring import Measurement, Scene, Side, Size, measure_steps
from tests.helpers.clock import Clock
from trainer.train.step import train_step

CLAIM = Claim("quick", "it is faster", Source("a guide", "https://example.org"), "settings", "off", "on")
TINY = ("data.global_batch_size=16", "data.micro_batch_size=16", "model.width=4", "parallel.threads=1")


def measured(low: float, ratio: float, high: float, rounds: int = 9, counted: bool = False) -> Measured:
    return Measured(1.0, ratio, ratio, low, high, rounds, "ms", counted)


@pytest.mark.parametrize(
    ("found", "most", "verdict"),
    [
        (measured(0.80, 0.85, 0.90), 0.90, "holds"),
        (measured(0.90, 0.95, 0.99), 0.90, "undecided"),
        (measured(0.91, 0.95, 0.99), 0.90, "doesn't hold"),
        (measured(0.80, 0.85, 0.88, rounds=5), 0.90, "undecided"),
        (measured(0.5, 0.5, 0.5, rounds=1, counted=True), 0.5, "holds"),
        (None, 0.90, "not measured"),
    ],
)
def test_the_verdict(found: Measured | None, most: float, verdict: str) -> None:
    assert judge(found, most) == verdict
    assert Row(Claim("n", "t", Source("s"), "a", "b", "t", most), measured=found).verdict == verdict


@pytest.mark.parametrize(("more", "ratio", "verdict"), [(0.0, 1.0, "doesn't hold"), (-0.5, 0.5, "holds")])
def test_steps_are_timed_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: float, ratio: float, verdict: str
) -> None:
    """On a clock that each step moves by a second: an ablation that does nothing isn't said to help."""
    clock = Clock()

    def step(*arguments: Any) -> None:
        train_step(*arguments)
        clock.move(1.0)

    monkeypatch.setattr(measuring, "train_step", step)
    monkeypatch.setattr(measuring, "now", lambda _: clock())
    size = Size(rounds=6, turn_s=2.0, images=0, scratch=tmp_path)
    sides = {"off": Side(), "on": Side(each=lambda _: clock.move(more))}
    found = measure_steps(Scene("digits", TINY, TINY), sides, size)
    assert found.conditions.endswith("; 2 steps a turn")
    time = compare(found.series["time"], "off", "on")
    assert (time.base, time.low, time.ratio, time.high) == (1000.0, ratio, ratio, ratio)
    assert judge(time, CLAIM.most) == verdict


def test_a_claim_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def here(name: str, sides: Collection[str], size: Size, _: float) -> Measurement:
        return ABLATIONS[name].measure(sorted(sides), size._replace(turn_s=0.0))

    monkeypatch.setattr(runs, "run_claims", partial(runs.run_claims, measure=here))
    monkeypatch.setattr(measuring, "threads_per_rank", lambda *_: 1)
    monkeypatch.setattr(runs, "QUICK", runs.QUICK._replace(limit_s=3600.0))
    assert main(["claims", "--quick", "--only", "logging", "--out", str(tmp_path / "out")]) == 0
    (found,) = json.loads((tmp_path / "out" / "claims.json").read_text())["claims"]
    assert (found["name"], found["measured"]["rounds"]) == ("logging", 6)
    assert f"{found['measured']['ratio']:.3f}" in capsys.readouterr().out
    assert (tmp_path / "out" / "claims.svg").read_text().startswith("<?xml")
