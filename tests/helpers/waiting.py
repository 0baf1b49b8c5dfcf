"""Waits for a state instead of a time."""

import time
from collections.abc import Callable


def until(state: Callable[[], object], told: Callable[[], object] = lambda: "", seconds: float = 120) -> None:
    """Returns when `state()` is true; after so many seconds it fails with what `told()` says."""
    end = time.monotonic() + seconds
    while not state():
        assert time.monotonic() < end, f"not within {seconds:g} s: {told()}"
        time.sleep(0.01)
