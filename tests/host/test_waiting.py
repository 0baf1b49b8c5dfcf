"""Promise: compute threads spin only where other processes leave a CPU for each; a user's choice stays."""

import math
import os
import sys
from collections.abc import Mapping

import pytest

from trainer.host import startup
from trainer.host.limits import Limits
from trainer.host.startup import SPINS, choose_waiting, free_cpus


@pytest.mark.parametrize(
    ("after", "own", "free"),
    [
        ({0: (190, 200), 1: (90, 200)}, 100.0, 2.0),  # this process alone kept a CPU busy
        ({0: (190, 200), 1: (90, 200)}, 0.0, 1.0),  # somebody else did
        ({0: (90, 200), 1: (90, 200)}, 50.0, 0.5),
        ({0: (90, 110), 1: (99, 109)}, 0.0, 0.0),  # too short to tell
        ({}, 50.0, 0.0),
        ({0: (190, 200), 1: (190, 200), 2: (190, 200)}, 0.0, 2.0),  # may not run on the third
    ],
)
def test_free_cpus(after: Mapping[int, tuple[int, int]], own: float, free: float) -> None:
    assert free_cpus({0: (90, 100), 1: (90, 100), 2: (0, 0)}, after, own, {0, 1}) == free


@pytest.mark.parametrize(
    ("needed", "free", "cpus", "given", "expected"),
    [
        (2.0, 2.0, 2.0, {}, {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": str(SPINS)}),
        (2.0, 1.2, 2.0, {}, {"OMP_WAIT_POLICY": "PASSIVE"}),  # a busy process beside it
        (2.0, 2.0, 1.5, {}, {"OMP_WAIT_POLICY": "PASSIVE"}),  # spinning would use up a quota
        (math.inf, 2.0, 2.0, {}, {"OMP_WAIT_POLICY": "PASSIVE"}),
        (2.0, 2.0, 2.0, {"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
        (2.0, 2.0, 2.0, {"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
    ],
)
def test_how_threads_wait(
    monkeypatch: pytest.MonkeyPatch,
    needed: float,
    free: float,
    cpus: float,
    given: dict[str, str],
    expected: dict[str, str],
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(os, "environ", dict(given))
    monkeypatch.setattr(startup, "allowed_cpus", lambda: {0, 1})
    monkeypatch.setattr(startup, "free_cpus", lambda *_: free)
    monkeypatch.setattr(startup, "read_limits", lambda: Limits(cpus, 1 << 34, 1 << 30, None, {}))
    choose_waiting(needed)
    assert os.environ == expected
    monkeypatch.setitem(sys.modules, "torch", sys)
    monkeypatch.setattr(os, "environ", {})
    choose_waiting(needed)
    assert os.environ == {}, "torch has read them"
