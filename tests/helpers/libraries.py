"""The libraries that benches run against: often not installed, as in CI."""

import pytest

from benchmarks.against import version
from trainer.errors import BadInputError


def require(library: str) -> None:
    """Skips where a library isn't installed."""
    try:
        version(library)
    except BadInputError as error:
        pytest.skip(str(error))
