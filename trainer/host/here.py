"""The folder of relative paths: where the run was started, even if user code changed the current folder."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_here: str | None = None


@contextmanager
def paths_from_here() -> Iterator[None]:
    """Context manager that fixes the current folder for `from_here`; the outermost one decides."""
    global _here  # noqa: PLW0603
    before = _here
    if _here is None:
        with suppress(OSError):  # it was deleted
            _here = str(Path.cwd())
    try:
        yield
    finally:
        _here = before


def from_here(path: Path) -> Path:
    """A path that means the same although the current folder may be another now; as it is where it isn't."""
    with suppress(OSError):
        if _here is None or str(Path.cwd()) == _here:
            return path
    return Path(_here or "") / path


def path_shown(path: Path) -> Path:
    """A path as one would type it here: relative if it lies below the current folder."""
    with suppress(OSError, ValueError):  # the current folder was deleted; or it isn't below it
        return path.relative_to(Path.cwd())
    return path


@contextmanager
def folder_kept() -> Iterator[None]:
    """Comes back, at its end, to the current folder of now."""
    before = ""
    with suppress(OSError):
        before = str(Path.cwd())
    try:
        yield
    finally:
        with suppress(OSError):
            if before and before != str(Path.cwd()):
                os.chdir(before)
