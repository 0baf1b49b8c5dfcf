"""Writes the page: for `trainer report`, and at the end of a training."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from trainer.errors import (
    EXIT_BAD_INPUT,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_REQUEUE,
    BadInputError,
    StopRun,
    writing,
)
from trainer.host.files import write_whole
from trainer.host.here import path_shown
from trainer.host.latest import MANIFEST
from trainer.observe.console import warn
from trainer.observe.text import plain
from trainer.runs.report.read import read_recorded_run

NAME = "report.html"
_RUNS = 14  # seven colors, drawn through and dashed
# Largest metrics.jsonl at the end of a training: reading takes about 25 s for each GB.
_QUICK = 256 << 20


def write_report(folders: Sequence[Path], out: Path) -> None:
    """Writes the report of a run, or of several side by side; the file is replaced atomically.

    Raises:
        BadInputError: If a folder holds no run, there are too many, or the file can't be written.
    """
    if not 1 <= len(folders) <= _RUNS:
        raise BadInputError(f"{len(folders)} runs: a report shows 1 to {_RUNS}; give fewer")
    from trainer.runs.report.page import page  # imports jinja2, which isn't needed at the start

    try:
        text = page([read_recorded_run(folder) for folder in folders])
    except RecursionError as error:
        raise BadInputError(f"{folders[0]}: its manifest is nested too deeply; bring it back") from error
    with writing(str(out), "give another --out"):
        write_whole(out, text)


def leave_report(folder: Path) -> None:
    """Writes RUN/report.html at the end of a training; an error is printed, not raised."""
    try:
        if (rows := folder / "metrics.jsonl").exists() and rows.stat().st_size > _QUICK:
            raise BadInputError(f"{rows.name} is large: trainer report {folder} takes its time")
        write_report([folder], folder / NAME)
    except Exception as error:  # any error: the training has finished, and that counts
        warn(f"no report was written ({plain(' '.join(f'{error or type(error).__name__}'.split()))})")


def report_failure(folder: Path, code: int) -> int:
    """Writes the report of a run whose ranks failed, and prints its path; returns the exit code."""
    if code not in (EXIT_DONE, EXIT_REQUEUE, EXIT_BAD_INPUT) and (folder / MANIFEST).is_file():
        leave_report(folder)
        there = folder / NAME if (folder / NAME).exists() else folder
        warn(f"the run folder is {path_shown(folder)}; its report: {path_shown(there)}")
    return code


@contextmanager
def failure_reported(folder: Path) -> Iterator[None]:
    """Writes the report where the body raises: for a rank without a launcher."""
    try:
        yield
    except BadInputError as error:
        if error.late:
            report_failure(folder, EXIT_FAILED)
        raise
    except StopRun:
        leave_report(folder)
        raise
    except Exception:
        report_failure(folder, EXIT_FAILED)
        raise
