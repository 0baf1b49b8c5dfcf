"""What the tests of the benchmarks share."""

import pytest

from benchmarks.scoreboard import quiet


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It isn't asked whether the machine is quiet, which takes two seconds."""
    monkeypatch.setattr(quiet, "share_of_cpus", lambda: 1.0)
