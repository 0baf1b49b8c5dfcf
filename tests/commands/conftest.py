"""Fixtures of the tests of exports."""

import subprocess
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.commands.export import check, reload


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads exports in this process: a fresh one imports torch, and maybe a library, for seconds."""

    def run(words: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(words, reload.main(words[3:]), "", "")

    for name, value in {**reload.ONLY_WEIGHTS, "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    kept = {"DEVNULL": subprocess.DEVNULL, "TimeoutExpired": subprocess.TimeoutExpired}
    monkeypatch.setattr(check, "subprocess", SimpleNamespace(run=run, **kept))
