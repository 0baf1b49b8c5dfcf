"""Promise: a run explains itself: a verdict at its end, memory at each epoch, costs, who held the memory."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.forked import attempt, replace, small
from tests.helpers.refusals import named
from tests.helpers.rows import read_rows
from trainer.observe.advice import Advisor
from trainer.observe.diagnosis import Facts, diagnose, explained, merge
from trainer.observe.log import Logged, Row
from trainer.observe.phases import PHASES
from trainer.tasks.classification import Classification

FACTS = Facts(on_gpu=False, ranks=1, local_ranks=1, threads=1, cpus=2, step_samples=64, micro_batch_size=64)


@pytest.mark.compat
def test_a_run_says_where_its_time_went_and_what_it_cost(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    attempt(folder, small(log={"price_per_hour": 3600.0}), code=0)
    rows = read_rows(folder, ())
    (verdict,) = [row for row in rows if row["kind"] == "verdict" and row["final"]]
    end = rows[-1]
    assert (verdict["step"], bool(verdict["text"]), end["kind"]) == (16, True, "end")
    parts = sum(end[f"time/{phase}"] for phase in (*PHASES, "unexplained"))
    assert parts == pytest.approx(end["time/wall"])
    assert end["time/evaluation"] > 0
    assert end["cost/money"] == pytest.approx(end["time/wall"])
    trained = end["step"] * small().data.global_batch_size
    assert end["cost/per_thousand_samples"] == pytest.approx(1000 * end["cost/money"] / trained)
    memory = [(row["step"], row["at"]) for row in rows if row["kind"] == "memory"]
    assert memory == [(0, "start"), (8, "end"), (8, "start"), (16, "end")]
    assert all(row["memory/rss_bytes"] > 1 << 24 for row in rows if row["kind"] == "memory")
    assert all(row["flops_per_s"] > 0 for row in [row for row in rows if row["kind"] == "train"][1:])


def test_the_verdict_of_a_run_is_on_all_of_its_attempts() -> None:
    """Nine tenths of a run were held up; its last attempt wasn't."""
    slow: Row = {"kind": "train", "step": 9, "samples_per_s": 1.0, "time/wall": 90.0, "time/gc": 60.0}
    quick: Row = {**slow, "step": 10, "time/wall": 10.0, "time/gc": 0.0, "time/forward": 10.0}
    alone = Advisor(FACTS, None, lambda _: None)
    alone(quick)
    verdict = alone.conclude(10, {})
    assert verdict is not None and verdict.cause == "none"
    kept = json.loads(json.dumps(explained([slow, {**slow, "loss": math.nan}])))
    advisor = Advisor(FACTS, None, lambda _: None, logged=Logged(9, 1.0, 1, [kept]))
    advisor(quick)
    verdict = advisor.conclude(10, {})
    assert verdict is not None and verdict.cause == "gc"
    assert advisor.totals(1)["time/wall"] == 190


@pytest.mark.compat
def test_no_memory_is_a_paragraph_and_no_traceback(tmp_path: Path) -> None:
    def greedy() -> None:
        loss = Classification.loss

        def more(*arguments: Any) -> torch.Tensor:
            torch.empty(1 << 56, dtype=torch.uint8)  # more than any machine has
            return loss(*arguments)

        replace(Classification, "loss", more)

    ended = attempt(tmp_path / "run", before=greedy, code=1)
    assert "Traceback" not in ended.said
    assert named(ended.line, "host test_explain.py data.micro_batch_size")


def row(step: int, **times: float) -> dict[str, Any]:
    split = {"wall": 1.0, "forward": 1 - sum(times.values()), **times}
    shown = {f"time/{phase}": seconds for phase, seconds in split.items()}
    return {"kind": "train", "step": step, "samples_per_s": 1.0, **shown}


def test_a_moment_is_no_reason_to_speak_and_a_change_is() -> None:
    told: list[Any] = []
    advisor = Advisor(FACTS, None, told.append)
    for step, share in enumerate([0.0, 0.9, 0.0, 0.9, 0.9, 0.9, 0.0, 0.0, 0.9]):
        advisor(row(step, checkpoint=share))
    assert [(one["step"], one["cause"]) for one in told] == [(4, "checkpoint"), (7, "none")]
    verdict = advisor.conclude(9, row(9))
    assert verdict is not None and verdict.cause == "checkpoint"
    assert verdict.share == pytest.approx(0.45)
    assert told[-1]["final"] == 1


def test_rows_are_merged_by_their_time() -> None:
    first = {"time/wall": 1.0, "time/data": 0.5, "cpu/used": 1.0, "slow_rank": 0, "slow_excess": 0.1}
    second = {"time/wall": 3.0, "time/data": 0.0, "cpu/used": 2.0, "slow_rank": 1, "slow_excess": 0.1}
    rows: list[Any] = [{**first, "slow_phase": "data"}, {**second, "slow_phase": "forward"}]
    merged = merge([*rows, {"time/wall": 4.0}])
    assert (merged["time/wall"], merged["time/data"], merged["slow_rank"]) == (8.0, 0.5, 1)
    assert merged["cpu/used"] == pytest.approx(1.75)
    assert merged["slow_excess"] == pytest.approx((3 * 0.1 - 0.1) / 4)  # rank 0 was the slow one for a while


def test_ranks_that_are_slow_in_turns_are_no_stragglers() -> None:
    two = dataclasses.replace(FACTS, ranks=2, local_ranks=2)
    times = {"time/wall": 1.0, "time/forward": 1.0, "slow_phase": "forward", "slow_excess": 0.15}
    turns: list[Any] = [{**times, "slow_rank": number % 2} for number in range(5)]
    assert diagnose(merge(turns), two).cause == "none"
    assert diagnose(merge([{**one, "slow_rank": 1} for one in turns]), two).cause == "straggler"
