"""Promise: the bench compares a resumed run with an uninterrupted one."""

import pytest

from benchmarks.__main__ import main
from benchmarks.cut_run import UPDATES
from benchmarks.resume import CUTS
from tests.helpers.tables import table_rows


def test_the_trainer_goes_on_with_the_same_bits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume"]) == 0
    table = table_rows(capsys.readouterr().out)
    same = [[str(cut), str(UPDATES - cut), "0", "0", "0", "same", "same"] for cut in CUTS]
    assert [row[1:] for row in table] == same
