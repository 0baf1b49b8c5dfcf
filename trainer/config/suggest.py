"""The nearest name, for messages about a name that doesn't exist."""

import difflib
from collections.abc import Iterable

# tests/config/test_config.py has slips that are found with this, and words that are slips of no name.
_CUTOFF = 0.7


def alike(name: str, known: Iterable[str]) -> str:
    """The name that one is a slip of, or an empty string."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=_CUTOFF)), "")


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean 'x'?" or an empty string."""
    found = alike(name, known)
    return f"; did you mean '{found}'?" if found else ""
