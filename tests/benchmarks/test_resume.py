"""Promise: the bench compares a resumed run with an uninterrupted one, and fails if they differ."""

from typing import Any

import pytest
import torch

from benchmarks import resume
from benchmarks.__main__ import main
from benchmarks.cut_run import UPDATES
from benchmarks.resume import CUTS
from tests.helpers.tables import table_rows
from trainer.train.state import TrainState, load_tensors


def test_the_trainer_goes_on_with_the_same_bits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume"]) == 0
    table = table_rows(capsys.readouterr().out)
    same = [[str(cut), str(UPDATES - cut), "0", "0", "0", "same", "same"] for cut in CUTS]
    assert [row[1:] for row in table] == same


def one_bit(state: TrainState, step: int, saved: Any) -> None:
    load_tensors(state, step, saved)
    # Not the lowest: the next updates may round it away, on some processors and not on others.
    next(state.model.parameters()).detach().view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 15)


def test_a_run_that_goes_on_wrongly_fails_the_bench(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resume, "load_tensors", one_bit)
    monkeypatch.setattr(resume, "CUTS", (33,))
    assert main(["resume"]) == 1
    (row,) = table_rows(capsys.readouterr().out)
    assert (row[3], row[-2:]) == ("0", ["other", "DIFFERENT"])
