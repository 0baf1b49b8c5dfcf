"""Runs whose rank is a fork of its launcher, which may decide otherwise on a busy machine."""

import os
from collections.abc import Callable

import pytest

from trainer.host.limits import allowed_cpus

_TRIES = 3


def forked_or_skipped(start: Callable[[], bool]) -> None:
    """Starts runs until the rank of one was a fork; skips the test if other work is why none was.

    A launcher doesn't fork while a thread that is about to end is still there, for which it waits a second.
    On a machine that has nothing else to do, a rank that is no fork is a fault.

    Args:
        start: Makes a run, and returns True if its rank was a fork of its launcher.
    """
    for _ in range(_TRIES):
        if start():
            return
    load, cpus = os.getloadavg()[0], len(allowed_cpus())
    if load > cpus:
        pytest.skip(
            f"no rank was a fork in {_TRIES} runs, beside other work (load {load:.1f} on {cpus} CPUs)"
        )
    pytest.fail(f"no rank was a fork in {_TRIES} runs, on a machine with a load of {load:.1f}")
