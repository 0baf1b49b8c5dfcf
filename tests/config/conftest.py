"""Fixtures of several tests of bad input."""

from pathlib import Path
from typing import Any

import pytest

from trainer.train.start import resolve as start


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def launch(*_: Any, **__: Any) -> int:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(start, "launch", launch)
    monkeypatch.chdir(tmp_path)
