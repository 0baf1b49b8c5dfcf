"""Waits for a state, never for a time."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(state: Callable[[], T], what: str, told: Callable[[], object] = str, seconds: float = 120.0) -> T:
    """What `state` returns once that is true.

    Args:
        state: Looked at again and again.
        what: In words, for when it never is.
        told: All that helps then, such as the output so far.
        seconds: After which it never will be; a machine that is merely slow is quicker.
    """
    limit = time.monotonic() + seconds
    while not (found := state()):
        if time.monotonic() > limit:
            raise AssertionError(f"not within {seconds:g} s: {what}\n{told()}")
        time.sleep(0.02)
    return found
