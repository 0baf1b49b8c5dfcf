"""Fixtures of several tests of bad input."""

from pathlib import Path

import pytest

from tests.helpers.preparing import prepare_only
from trainer.train.start import job


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(job, "launch", prepare_only)
    monkeypatch.chdir(tmp_path)
