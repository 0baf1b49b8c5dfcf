"""Promise: the bench measures what reaches the optimizer."""

import pytest

from benchmarks.__main__ import main
from benchmarks.accumulation import CASES
from tests.helpers.tables import table_rows


def test_the_trainer_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["accumulation"]) == 0
    table = table_rows(capsys.readouterr().out)
    assert len(table) == 2 * len(CASES)
    assert all(row[-1] == "exact" and row[3] == row[4] and float(row[5]) <= 1e-12 for row in table), table
