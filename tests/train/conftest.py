"""What tests of trainings share."""

from pathlib import Path

import pytest


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The current folder, of the test alone."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
