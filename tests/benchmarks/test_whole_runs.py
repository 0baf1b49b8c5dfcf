"""Promise: `benchmarks setting --runs` compares whole runs, in processes of their own."""

import subprocess
from collections.abc import Mapping, Sequence

import pytest

from benchmarks import whole_runs
from tests.helpers.refusals import refused


def test_a_variable_reaches_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(words: Sequence[str], env: Mapping[str, str], **_: object) -> subprocess.CompletedProcess[str]:
        assert env["PYTORCH_ALLOC_CONF"] == "backend:native" and "memory.allocator=async" in words
        return subprocess.CompletedProcess(words, 2)

    monkeypatch.setattr(subprocess, "run", run)
    with refused("env:PYTORCH_ALLOC_CONF=backend:native", "2"):
        whole_runs.run("digits", ["env:PYTORCH_ALLOC_CONF=backend:native", "memory.allocator=async"])
