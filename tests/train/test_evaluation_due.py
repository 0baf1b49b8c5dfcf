"""Promise: a run is evaluated when its recipe says, resumed or not, and ends when that gets no better."""

import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from tests.helpers.forked import attempt, replace, small
from tests.helpers.refusals import named, refused
from tests.helpers.rows import read_rows
from tests.helpers.run_folders import manifest, same
from tests.helpers.toys import TokenTask, build_alone, make_recipe
from trainer.checkpoint import CHECKPOINTS
from trainer.checkpoint.folder import folder_name
from trainer.config.data import Last
from trainer.config.recipe import Recipe
from trainer.config.section import validated
from trainer.config.training import EvaluationConfig
from trainer.data.sampling.plan import Plan
from trainer.observe.phases import PHASE_TIMER
from trainer.train import evaluate
from trainer.train.evaluate import evaluate_run, next_evaluation, out_of_patience

lasts: st.SearchStrategy[Last] = st.sampled_from(("cross", "drop", "weighted"))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    global_batch_size, last = draw(st.integers(1, 12)), draw(lasts)
    samples = draw(st.integers(global_batch_size if last == "drop" else 1, 120))
    epochs, most = draw(st.integers(1, 6)), draw(st.none() | st.integers(1, 40))
    return Plan(samples, global_batch_size, 1, epochs, last, seed=0, max_steps=most)


def epoch_ends(plan: Plan, epochs: int) -> list[int]:
    """The steps after which so many epochs more are through, by walking all samples."""
    whole, samples, size = plan.samples // plan.global_batch_size, plan.samples, plan.global_batch_size
    ends = []
    for epoch in range(epochs, plan.epochs + 1, epochs):
        steps = {"cross": -(-epoch * samples // size), "drop": epoch * whole}
        ends.append(steps.get(plan.last, epoch * -(-samples // size)))
    return [step for step in ends if step <= plan.steps]


@given(plan=plans(), every=st.integers(1, 12), unit=st.sampled_from(("epoch", "step", "end")))
@example(plan=Plan(10, 1, 1, 1, "cross", seed=0), every=3, unit="step")
def test_the_next_evaluation_is_that_of_the_plain_definition(plan: Plan, every: int, unit: str) -> None:
    config = EvaluationConfig(every="end" if unit == "end" else f"{every} {unit}s")
    steps = range(1, plan.steps + 1)
    due = {"epoch": epoch_ends(plan, every), "step": [one for one in steps if one % every == 0], "end": []}
    ends = sorted({*due[unit], plan.steps})
    for done in range(plan.steps):  # so a run resumed there evaluates where the unbroken one does
        assert next_evaluation(config, plan, done) == min(step for step in ends if step > done)


@pytest.mark.parametrize("every", [5, "0 steps", "1.5 epochs", "2 hours"])
def test_what_is_no_interval_is_one_line(every: Any) -> None:
    with refused("mine evaluation.every", '"2 epochs"', '"500 steps"', '"end"'):
        validated(Recipe, {"epochs": 1, "evaluation": {"every": every}}, "mine")


# Of 16 steps, evaluated after each second; better at 2 and 6 only, so that three in a row end it at 12.
PATIENT = small(
    evaluation={"every": "2 steps", "patience": 3}, checkpoint={"every": 5, "best": True, "keep": 1}
)
SCORES = {2: 0.5, 4: 0.4, 6: 0.6, 8: 0.6, 10: 0.1, 12: 0.59, 14: 0.9}
ENDS, BEST = 12, 6


def scored(scores: Mapping[int, float] = SCORES) -> Callable[[], None]:
    """Lets a fork's evaluations give these scores, by step."""

    def put_in() -> None:
        measured = evaluate.evaluate

        def measure(task: Any, *arguments: Any) -> dict[str, float]:
            return {**measured(task, *arguments), task.metric: scores[PHASE_TIMER.step]}

        replace(evaluate, "evaluate", measure)

    return put_in


def evaluated(folder: Path) -> list[int]:
    return [row["step"] for row in read_rows(folder, ("eval",))]


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ended early."""
    folder = tmp_path_factory.mktemp("patient") / "run"
    done = attempt(folder, PATIENT, before=scored(), code=0)
    assert named(done.said, f"{ENDS} 16 {BEST} 3")
    return folder


def test_patience_ends_a_run(patient: Path) -> None:
    assert evaluated(patient) == [2, 4, 6, 8, 10, 12]
    assert (manifest(patient)["status"], manifest(patient)["steps_done"]) == ("finished", ENDS)
    assert read_rows(patient, ("end",))[-1]["step"] == ENDS
    assert read_rows(patient, ("train",))[-1]["step"] == ENDS
    kept = {path.name for path in (patient / CHECKPOINTS).iterdir()}
    assert kept == {folder_name(step) for step in (BEST, ENDS)}, "the best and the last"


def test_stopped_between_two_evaluations_it_ends_at_the_same_step(patient: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    attempt(folder, PATIENT, stop_after=9, before=scored(), code=75)
    attempt(folder, PATIENT, before=scored(), code=0)
    assert evaluated(folder) == evaluated(patient)
    assert manifest(folder)["steps_done"] == ENDS
    assert same(folder, patient)


def test_more_steps_alone_do_not_extend_a_run_that_is_out_of_patience(patient: Path, tmp_path: Path) -> None:
    """With more patience it goes on, by that alone, too."""
    folder = shutil.copytree(patient, tmp_path / "run")
    assert manifest(folder)["out_of_patience"] == 3
    refused = attempt(folder, PATIENT.model_copy(update={"max_steps": 20}))
    assert (refused.code, refused.said) == (2, "")
    assert named(refused.line, f"{ENDS} evaluation.patience 3 0")
    assert attempt(folder, PATIENT, "force").code == 0, "nothing of its end was changed"
    scores, patienter = {**SCORES, 16: 0.2}, PATIENT.model_copy(deep=True)
    patienter.evaluation.patience = 9
    attempt(folder, patienter, before=scored(scores), code=0)
    assert (manifest(folder)["steps_done"], manifest(folder)["out_of_patience"]) == (16, 0)


def test_what_is_no_number_is_not_better(monkeypatch: pytest.MonkeyPatch) -> None:
    run = build_alone(make_recipe(evaluation={"patience": 2}), TokenTask(16))
    found = []
    for loss in (math.nan, 2.0, math.nan, 3.0, 1.0, math.inf, -math.inf):
        monkeypatch.setattr(evaluate, "evaluate", lambda *_, loss=loss: {"loss": loss})
        _, best = evaluate_run(run)
        found.append((best, run.state.no_better, out_of_patience(run)))
    assert [best for best, _, _ in found] == [False, True, False, False, True, False, False]
    assert [waited for _, waited, _ in found] == [1, 0, 1, 2, 0, 1, 2]
    assert [over for *_, over in found] == [False, False, False, True, False, False, True]
