"""Promise: a start imports only what it needs, once."""

import pytest

from benchmarks.start import one_start

# Seen with torch 2.9.1: 362 and 1,743. TensorBoard's writer is 320 of them; torch's compiler has 830.
MOST_MODULES = (450, 1900)


@pytest.mark.slow
def test_a_start_is_two_interpreters_with_few_modules() -> None:
    """A start as a user has it: the launcher has no torch, and one rank imports it."""
    found = one_start()
    assert found.interpreters == 2
    assert all(few <= most for few, most in zip(found.modules, MOST_MODULES, strict=True)), found.modules
