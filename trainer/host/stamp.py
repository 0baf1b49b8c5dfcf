"""Records of an installation: scripts/bootstrap.py leaves one in .venv, install_wheels.py in the image."""

import json
from pathlib import Path
from typing import NamedTuple

_STAMP = ".bootstrap.json"


class Stamp(NamedTuple):
    """Sources that an environment was installed from.

    Attributes:
        lock: SHA-256 of its wheels.lock, or None if unknown.
        changing: Whether an installer was interrupted, so that it may hold half a package.
    """

    lock: str | None
    changing: bool


def read_stamp(prefix: Path) -> Stamp:
    """Reads it; an environment of the user's own has none."""
    try:
        found = json.loads((prefix / _STAMP).read_text())
        lock, changing = found.get("lock"), bool(found.get("changing"))
    except (OSError, ValueError, AttributeError):
        return Stamp(None, False)
    return Stamp(lock if isinstance(lock, str) else None, changing)
