"""Promise: a run names its bottleneck. Recorded runs are judged again; `make slowdowns` records new ones."""

import dataclasses
import gc
from typing import Any

import pytest
import torch

from benchmarks.slowdowns import gpu, record
from trainer.config.training import CheckpointConfig, EvaluationConfig
from trainer.observe.advice import host_clock
from trainer.observe.diagnosis import Facts, diagnose_run, fewer_checkpoints, fewer_evaluations
from trainer.observe.phases import enter_phase

RECORDS = {kept.name: kept for kept in record.read_all()}
# What was named wrongly when it was recorded; the page of results says why.
WRONG = {"pack-to-list", "digits-pair-burners", "healthy-digits-pair", "healthy-digits-tree"}
WRONG |= {"healthy-pack-pair", "healthy-synthetic-pair"}
ALONE = Facts(on_gpu=False, ranks=1, local_ranks=1, threads=1, cpus=2, step_samples=64, micro_batch_size=8)


def of(**seconds: float) -> dict[str, float]:
    return {f"time/{name}": value for name, value in seconds.items()}


LONG = of(wall=10.0, start=1.0, forward=4.0, backward=4.0, update=0.5)


@pytest.mark.parametrize(
    ("metrics", "profiled", "cause", "text"),
    [
        (LONG, False, "none", "94%"),
        ({**LONG, **of(gc=6.0)}, True, "unknown", "profiler"),
        # In a second of training anything is a large share.
        (of(wall=3.0, start=2.1, gc=0.5), False, "unknown", "0.9 s"),
        # What torch.compile takes is neither computing nor waiting.
        (of(wall=30.0, forward=29.0, compile=29.2), False, "unknown", "0.8 s of training after the start"),
        (of(wall=30.0, forward=24.0, compile=20.0, data=6.0), False, "data-batch", "60%"),
        # Nothing stands out, and most isn't computing either.
        (of(wall=10, forward=1.2, data=1.4, end=3, evaluation=4.4), False, "none", "12%"),
    ],
)
def test_a_run_is_not_judged_without_grounds(
    metrics: dict[str, float], profiled: bool, cause: str, text: str
) -> None:
    verdict = diagnose_run(metrics, dataclasses.replace(ALONE, profiled=profiled))
    assert verdict.cause == cause and text in verdict.text and "0.0 ms" not in verdict.text


def test_compiling_is_timed_while_something_compiles() -> None:
    from torch._dynamo.callback import callback_handler

    with host_clock() as take:
        assert "time/compile" not in take()

        def collecting(graph: Any, _: Any) -> Any:
            gc.collect()
            return graph

        enter_phase("forward")
        torch.compile(lambda x: x * 2 + 3, backend="eager")(torch.ones(3))  # imports what compiling takes
        take()
        torch.compile(lambda x: x * 2 + 1, backend=collecting)(torch.ones(3))
        found = take()
        assert found["time/compile"] > 0 and found["time/gc"] < found["time/compile"] / 10
        assert "time/compile" not in take()
        enter_phase("evaluation")  # counts as that
        torch.compile(lambda x: x * 2 - 1, backend=collecting)(torch.ones(3))
        assert "time/compile" not in take()
    left = [getattr(one, "__qualname__", "") for one in callback_handler.start_callbacks]
    assert not any("host_clock" in name for name in left)


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_recorded_runs_are_judged_as_they_were(name: str) -> None:
    kept = RECORDS[name]
    verdict = kept.judged_again()
    if name in WRONG:
        pytest.skip(f"recorded as {kept.said.get('cause')}, which is wrong")
    assert kept.named(verdict.cause), verdict.text
    if kept.where == "cpu":
        assert verdict.cause == kept.said["cause"]


@pytest.mark.parametrize("made_up", list(gpu.records()), ids=lambda made_up: made_up.name)
def test_figures_of_a_gpu(made_up: record.Record) -> None:
    verdict = made_up.judged_again()
    assert made_up.named(verdict.cause), verdict.text


def test_no_loader_advice_where_the_device_is_busy() -> None:
    advised = [kept for kept in gpu.records() if float(kept.figures["gpu/utilization"]) >= 0.7]
    assert advised
    assert not [kept.name for kept in advised if kept.judged_again().cause.startswith("data-")]


EVERY, MINUTES, BEST = (f"checkpoint.{name}" for name in ("every", "minutes", "best"))
EVALUATED = "evaluation.every"


@pytest.mark.parametrize(
    ("checkpoint", "evaluation", "named"),
    [
        ({}, {"every": "1 steps"}, {MINUTES, BEST, EVALUATED}),
        ({"every": 5, "minutes": 0, "best": False}, {}, {EVERY}),
        ({"every": 5}, {"every": "end"}, {EVERY, MINUTES}),
        ({"minutes": 0, "best": False}, {}, set()),
    ],
)
def test_a_remedy_for_checkpoints_names_the_keys_that_make_some(
    checkpoint: dict[str, Any], evaluation: dict[str, Any], named: set[str]
) -> None:
    remedy = fewer_checkpoints(CheckpointConfig(**checkpoint), EvaluationConfig(**evaluation))
    assert {key for key in (EVERY, MINUTES, BEST, EVALUATED) if key in remedy} == named
    facts = dataclasses.replace(ALONE, fewer_checkpoints=remedy)
    verdict = diagnose_run({**LONG, "time/wall": 15.0, "time/checkpoint": 5.0}, facts)
    assert verdict.cause == "checkpoint" and verdict.text.endswith(remedy)


@pytest.mark.parametrize(("every", "named"), [("end", "data.eval_batch_size"), ("1 epoch", EVALUATED)])
def test_a_remedy_for_evaluations_names_the_key_that_helps(every: str, named: str) -> None:
    remedy = fewer_evaluations(EvaluationConfig(every=every))
    facts = dataclasses.replace(ALONE, fewer_evaluations=remedy)
    verdict = diagnose_run({**LONG, "time/wall": 35.0, "time/evaluation": 25.0}, facts)
    assert verdict.cause == "evaluation" and named in verdict.text and remedy in verdict.text
