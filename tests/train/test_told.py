"""Promise: what fails leaves its report and says where; messages speak of what was typed, or of `fit`."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.refusals import named, refused
from tests.helpers.small_task import Small
from trainer import fit
from trainer.runs.report.write import report_failure


class Failing:
    """A hook that fails."""

    def after_step(self, row: Any) -> None:  # noqa: ARG002
        """Fails at the first row."""
        raise ValueError("no more")


SETTINGS = {"epochs": 50, "data.samples": 9, "parallel.threads": 1, "log.every": 5}


def test_a_failed_run_has_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no more"):
        fit(Small, SETTINGS, out=tmp_path / "run", hooks=[Failing])
    assert "failed" in (tmp_path / "run/report.html").read_text()
    assert named(capsys.readouterr().err, f"{tmp_path / 'run'} data.samples data.name=own")
    (tmp_path / "run/report.html").unlink()
    assert report_failure(tmp_path / "run", 75) == 75 and report_failure(tmp_path / "run", 2) == 2
    assert not (tmp_path / "run/report.html").exists()
    assert report_failure(tmp_path / "run", 1) == 1
    assert (tmp_path / "run/report.html").exists()
    with refused("seed 0 1", tmp_path / "run"):
        fit(Small, {**SETTINGS, "seed": 1}, out=tmp_path / "run")
