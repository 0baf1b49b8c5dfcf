"""Runs that several test files look at; none changes them."""

from pathlib import Path

import pytest

from tests.helpers.forked import attempt


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert attempt(folder).code == 0
    return folder


@pytest.fixture(scope="session")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stopped after step 8: checkpoints of steps 5 and 8."""
    folder = tmp_path_factory.mktemp("runs") / "stopped"
    assert attempt(folder, stop_at=8).code == 75
    return folder
