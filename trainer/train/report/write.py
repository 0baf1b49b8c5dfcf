"""Writes the page: when it is asked for, and at the end of a training."""

from collections.abc import Sequence
from pathlib import Path

from trainer.errors import BadInputError
from trainer.host.files import write_whole
from trainer.observe.console import warn
from trainer.observe.text import plain
from trainer.train.report.page import page
from trainer.train.report.read import read_run

NAME = "report.html"
_RUNS = 14  # seven colors, drawn through and dashed
# At the end of a training nobody waits long: reading takes about 25 s for each GB.
_QUICK = 256 << 20


def write_report(folders: Sequence[Path], out: Path) -> None:
    """Writes the report of a run, or of several side by side, in one move.

    Raises:
        BadInputError: If a folder holds no run, there are too many, or the file can't be written.
    """
    if not 1 <= len(folders) <= _RUNS:
        raise BadInputError(f"{len(folders)} runs: a report shows 1 to {_RUNS}; give fewer")
    try:
        text = page([read_run(folder) for folder in folders])
    except RecursionError as error:
        raise BadInputError(f"{folders[0]}: its manifest is nested too deeply; bring it back") from error
    try:
        write_whole(out, text)
    except OSError as error:
        raise BadInputError(f"{out}: can't be written ({error.strerror}); give another --out") from error


def leave_report(folder: Path) -> None:
    """Writes RUN/report.html at the end of a training; what goes wrong is told, not raised."""
    try:
        for name in ("metrics.jsonl", "layers.jsonl"):
            if (rows := folder / name).exists() and rows.stat().st_size > _QUICK:
                raise BadInputError(f"{name} is large: trainer report {folder} takes its time")
        write_report([folder], folder / NAME)
    except Exception as error:  # whatever it is, the training is done and worth more
        warn(f"no report was written ({plain(' '.join(f'{error or type(error).__name__}'.split()))})")
