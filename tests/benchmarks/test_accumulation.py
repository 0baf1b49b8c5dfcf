"""Promise: the bench measures what reaches the optimizer, and fails where the trainer's own step is wrong."""

import importlib
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import accumulation, against
from benchmarks.__main__ import main
from benchmarks.accumulation import CASES, Case, Recorded, judge, steps_due
from benchmarks.against import timm
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


def test_no_update_is_nothing_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(accumulation, "train_step", lambda *_: None)
    assert main(["accumulation"]) == 3
    assert "nothing measured" in capsys.readouterr().out


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


# Stands in for timm's train.py, which isn't ours to carry: the same arguments, right or as told.
SCRIPT = """
import argparse, pathlib
import numpy as np, timm, torch
from PIL import Image

parser = argparse.ArgumentParser()
for name in ("data-dir", "model"):
    parser.add_argument("--" + name)
for name in ("batch-size", "grad-accum-steps"):
    parser.add_argument("--" + name, type=int)
options, _ = parser.parse_known_args()
model = timm.create_model(options.model)
before = [p.clone() for p in model.parameters()]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
files = sorted(pathlib.Path(options.data_dir, "train").glob("*/*.png"))
images = torch.stack([torch.tensor(np.array(Image.open(file))).permute(2, 0, 1) / 255 for file in files])
labels = torch.tensor([int(file.parent.name) for file in files])
batches = list(zip(images.split(options.batch_size), labels.split(options.batch_size)))
for start in range(0, len(batches), options.grad_accum_steps):
    step = batches[start:start + options.grad_accum_steps]
    for x, y in step:
        (torch.nn.functional.cross_entropy(model(x), y) / len(step)).backward()
    optimizer.step()
    optimizer.zero_grad()
assert all(torch.equal(a, b) for a, b in zip(before, model.parameters())), "the weights have changed"
"""


@pytest.mark.slow
def test_a_script_is_read_as_it_trains(tmp_path: Path) -> None:
    require("timm")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    (recorded,) = timm.accumulate(Case(7, 4, False), script)
    score = judge(recorded, 4, [4, 3])
    assert score.exact
    assert sum(len(x) for x, _ in recorded.seen) == 14


@pytest.mark.slow
def test_a_script_that_fails_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    require("timm")
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('no such flag')")
    assert main(["accumulation", "--against", "timm", "--timm-train", str(script)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "--against timm" in error
    assert "no such flag" in error
    with pytest.raises(against.LibraryFailed, match="no such flag") as failed:
        list(accumulation.measure_library("timm", partial(timm.accumulate, script=script)))
    assert failed.value.name == "timm"


def test_without_the_script_timm_is_named_as_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    require("timm")
    assert main(["accumulation", "--against", "timm"]) == 0
    out = capsys.readouterr().out
    assert "not measured" in out
    assert "--timm-train FILE" in out
    assert len(table_rows(out)) == 2 * len(CASES)


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


def test_a_missing_script_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    require("timm")
    assert main(["accumulation", "--against", "timm", "--timm-train", "/no/such.py"]) == 2
    assert "/no/such.py" in capsys.readouterr().err


def test_a_library_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(against.LIBRARIES, "lightning", "no-such-distribution")
    assert main(["accumulation", "--against", "lightning"]) == 2
    assert "pip install .[bench]" in capsys.readouterr().err


def test_who_offers_what_is_known_without_any_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("lightning", "accelerate", "timm", "ignite"):
        monkeypatch.setitem(sys.modules, library, None)
    for name in against.LIBRARIES:
        importlib.reload(importlib.import_module(f"benchmarks.against.{name}"))
    assert list(against.offering("accumulate")) == ["lightning", "accelerate", "timm"]
    assert list(against.offering("train_tiny")) == ["lightning", "fabric", "accelerate", "ignite"]
