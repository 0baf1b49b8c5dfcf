"""Fixtures of several commands' tests."""

from pathlib import Path

import pytest

from tests.helpers.job_tools import Tools


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return Tools(tmp_path, monkeypatch)
