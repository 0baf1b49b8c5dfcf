"""Promise: the bench measures what reaches the optimizer, and fails where the trainer's own step is wrong."""

from typing import Any

import pytest
import torch

from benchmarks import accumulation, against
from benchmarks.__main__ import main
from benchmarks.accumulation import CASES, Case, Recorded, judge, steps_due
from tests.helpers.libraries import require
from tests.helpers.tables import table_rows
from trainer.data.sampling import plan
from trainer.train.reduction import RaggedItemCount


def test_the_trainer_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["accumulation"]) == 0
    table = table_rows(capsys.readouterr().out)
    assert len(table) == 2 * len(CASES)
    for row in table:
        assert row[-1] == "exact"
        assert row[3] == row[4]
        assert float(row[5]) <= 1e-12


def forget_the_true_num_items(_: Any, loss: torch.Tensor, __: Any) -> torch.Tensor:
    return loss


@pytest.mark.parametrize(
    ("where", "what", "mutant"),
    [
        (plan.Plan, "step_samples", lambda self, _: self.global_batch_size),
        (RaggedItemCount, "correct", forget_the_true_num_items),
    ],
)
def test_a_wrong_step_fails_the_bench(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: Any, what: str, mutant: Any
) -> None:
    monkeypatch.setattr(where, what, mutant)
    assert main(["accumulation"]) == 1
    assert "WRONG" in capsys.readouterr().out


def trained(case: Case, sizes: list[int], scales: list[float], mean_of_means: bool = False) -> Recorded:
    """A loop by hand that updates after so many micro-batches, each loss times a scale."""
    recorded = Recorded("by hand")
    optimizer = accumulation.Recorder(recorded)
    batches = iter(case.loader())
    for size, scale in zip(sizes, scales, strict=True):
        step = [next(batches) for _ in range(size)]
        num_items = sum(int((y != -100).sum()) for _, y in step)
        for x, y in step:
            if mean_of_means:
                loss = recorded.loss(recorded.model, x, y) / size
            else:
                loss = recorded.loss(recorded.model, x, y, "sum") / num_items
            (loss * scale).backward()
        optimizer.step()
        optimizer.zero_grad()
    return recorded


@pytest.mark.parametrize("case", CASES)
def test_the_judge_accepts_the_right_gradients(case: Case) -> None:
    due = steps_due(case)
    score = judge(trained(case, due, [1.0] * len(due)), case.accumulation, due)
    assert score.exact
    assert score.ragged == pytest.approx([1.0])


def test_the_judge_sees_a_wrong_scale() -> None:
    score = judge(trained(Case(5, 4, False), [4, 1], [1.0, 0.25]), 4, [4, 1])
    assert not score.exact
    assert score.right == 1
    assert score.ragged == pytest.approx([0.25])
    assert score.full is not None
    assert score.full <= 1e-12


@pytest.mark.parametrize("sizes", [[4], [4, 2, 1], [4, 3, 0], []])
def test_the_judge_sees_wrong_updates(sizes: list[int]) -> None:
    recorded = trained(Case(7, 4, False), sizes, [1.0] * len(sizes)) if 0 not in sizes else None
    if recorded is None:
        recorded = trained(Case(7, 4, False), [4, 3], [1.0, 1.0])
        recorded.updates.append(recorded.updates[-1])
    score = judge(recorded, 4, [4, 3])
    assert score.cut == sizes
    assert score.right == {1: 1, 3: 1, 0: 0}[len(sizes)] + (0 in sizes)
    assert not score.exact


def test_the_judge_sees_a_mean_of_means() -> None:
    score = judge(trained(Case(7, 4, True), [4, 3], [1.0, 1.0], mean_of_means=True), 4, [4, 3])
    assert not score.exact
    assert score.full is not None
    assert score.full > 1e-3


@pytest.mark.parametrize("library", ["lightning", "accelerate"])
def test_what_a_library_is_given_and_what_is_read(library: str) -> None:
    """All micro-batches once and in order, nothing changed, full steps right: nothing was misread."""
    require(library)
    measure = against.chosen(library, "accumulate")[library]
    for case in CASES:
        x, y = case.data()
        for recorded in measure(case):
            assert torch.equal(torch.cat([seen for seen, _ in recorded.seen]), x)
            assert torch.equal(torch.cat([seen for _, seen in recorded.seen]), y)
            assert recorded.updates[-1][1].dtype == torch.float64
            fresh = Recorded("").model.parameters()
            assert all(torch.equal(a, b) for a, b in zip(fresh, recorded.model.parameters(), strict=True))
            if not case.tokens_vary:
                score = judge(recorded, case.accumulation, steps_due(case))
                assert score.full is not None
                assert score.full <= 1e-12


def test_a_library_is_shown_in_all_its_ways_on_all_cases() -> None:
    """Its best one, the loop that counts the tokens, is exact."""
    require("accelerate")
    measure = against.chosen("accelerate", "accumulate")["accelerate"]
    judged = list(accumulation.measure_library("accelerate", measure))
    ways = ("accumulate()", "tokens counted in the loop")
    assert [(one.case, one.variant) for one in judged] == [(case, way) for case in CASES for way in ways]
    exact = [(one.variant, one.case.tokens_vary) for one in judged if one.score and one.score.exact]
    assert exact == [(ways[1], case.tokens_vary) for case in CASES]
    assert {one.note.partition(",")[0] for one in judged if one.variant == ways[0]} == {
        "`with accelerator.accumulate(model)`"
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--against", "lightnin"], "did you mean 'lightning'? (there are: lightning, accelerate, timm)"),
        (["--against", "fabric"], "no library of this bench is called 'fabric'"),
        (["--timm-train", "train.py"], "only read with --against timm"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["accumulation", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert captured.out == ""
