"""Fixtures of several commands' tests."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.forked import attempt
from tests.helpers.job_tools import Tools
from trainer.commands.verify import replay as replaying
from trainer.config.recipe_file import load_recipe


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return Tools(tmp_path, monkeypatch)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> list[argparse.Namespace]:
    """Replays in a fork instead of a launch; what was asked for."""
    asked = list[argparse.Namespace]()

    def start(request: argparse.Namespace, *_: Any) -> int:
        asked.append(request)
        recipe = load_recipe(request.recipe, request.set)
        return attempt(request.out, recipe, request.resume, stop_after=request.stop_after).code

    monkeypatch.setattr(replaying, "start", start)
    return asked
