"""Content of folders."""

import hashlib
from pathlib import Path


def contents(folder: Path) -> dict[str, str]:
    """A digest of each file below it, by name."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
