"""Promise: the bench measures what reaches the optimizer, and fails where the trainer's own step is wrong."""

import pytest

from benchmarks.__main__ import main
from benchmarks.accumulation import CASES
from tests.helpers.tables import table_rows
from trainer.data.sampling import plan


def test_the_trainer_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["accumulation"]) == 0
    table = table_rows(capsys.readouterr().out)
    assert len(table) == 2 * len(CASES)
    assert all(row[-1] == "exact" and row[3] == row[4] and float(row[5]) <= 1e-12 for row in table), table


def test_a_wrong_step_fails_the_bench(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan.Plan, "step_samples", lambda self, _: self.global_batch_size)
    assert main(["accumulation"]) == 1
    assert "WRONG" in capsys.readouterr().out
