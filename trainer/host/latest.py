"""The folder of runs, and the link `runs/latest` to the newest."""

import contextlib
import os
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

from trainer.host.here import from_here

RUNS = Path("runs")
MANIFEST = "manifest.json"
EVALUATION = "evaluation.json"  # of the last `trainer evaluate`
LATEST = "latest"


def run_path(word: str) -> Path:
    """A run folder as it is typed: its path, its name below runs, or `latest` for the newest there.

    Raises:
        ArgumentTypeError: If there is none.
    """
    if word != LATEST or Path(word).exists():
        return RUNS / word if _is_below_runs(Path(word)) else Path(word)
    with contextlib.suppress(OSError):
        if (RUNS / LATEST / MANIFEST).is_file():
            # The run's own name, which is still the same when the link points to another.
            return RUNS / (RUNS / LATEST).readlink()
    if found := newest(RUNS):
        return found
    raise ArgumentTypeError(f"{LATEST}: there is no run below {RUNS}; give a run folder")


def _is_below_runs(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return _is_name(path) and not path.exists() and (RUNS / path).is_dir()
    return False


def _is_name(path: Path) -> bool:
    return len(path.parts) == 1 and path.name not in ("", "..")


def nor_below_runs(path: Path) -> str:
    """Returns a hint for a run folder that doesn't exist: the name was looked for in two places."""
    return f", and there is no {RUNS / path}" if _is_name(path) and not path.exists() else ""


def newest(root: Path, suits: Callable[[Path], bool] = lambda _: True) -> Path | None:
    """Returns the run folder in which a run that `suits` was begun or resumed last, or None."""
    times = dict[Path, float]()
    with contextlib.suppress(OSError):
        for path in root.iterdir():
            if not path.is_symlink() and (path / MANIFEST).is_file() and suits(path):
                times[path] = (path / MANIFEST).stat().st_mtime
    return max(times, key=times.__getitem__, default=None)


def link_latest(folder: Path) -> None:
    """Points runs/latest to a run that begins below runs, at once; where that can't be, nothing happens."""
    link, beside = folder.parent / LATEST, folder.parent / f".{LATEST}-{os.getpid()}"
    with contextlib.suppress(OSError):
        if not folder.parent.samefile(from_here(RUNS)) or (link.exists() and not link.is_symlink()):
            return
        try:
            beside.unlink(missing_ok=True)
            beside.symlink_to(folder.name)
            os.replace(beside, link)  # noqa: PTH105  (a test counts what Path.replace moves)
        finally:
            beside.unlink(missing_ok=True)
