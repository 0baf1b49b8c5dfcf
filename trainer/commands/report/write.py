"""`trainer report RUN …`: writes the page."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from trainer.commands.report.page import MARK, page
from trainer.commands.report.read import read_run
from trainer.config.redact import redact_text
from trainer.errors import EXIT_DONE, BadInputError
from trainer.observe.text import plain

NAME = "report.html"
_RUNS = 14  # seven colours, drawn through and dashed
# At the end of a training nobody waits long: reading takes about 25 s for each GB.
_QUICK = 256 << 20
_HEAD = 1 << 18  # bytes of a report that its style and its mark are in


def write_report(folders: Sequence[Path], out: Path) -> None:
    """Writes the report of a run, or of several side by side, in one move.

    Args:
        folders: Run folders.
        out: The file; replaced if there is one.

    Raises:
        BadInputError: If a folder holds no run, there are too many, or the file can't be written.
    """
    if not 1 <= len(folders) <= _RUNS:
        raise BadInputError(f"{len(folders)} runs: a report shows 1 to {_RUNS}; give fewer")
    try:
        text = page([read_run(folder) for folder in folders])
    except RecursionError as error:
        raise BadInputError(f"{folders[0]}: its manifest is nested too deeply; bring it back") from error
    beside = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        try:
            beside.write_text(text, encoding="utf-8", errors="replace")
            beside.replace(out)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise BadInputError(f"{out}: can't be written ({error.strerror}); give another --out") from error


def leave_report(folder: Path) -> None:
    """Writes RUN/report.html at the end of a training; what goes wrong is told, not raised."""
    try:
        rows = folder / "metrics.jsonl"
        if rows.exists() and rows.stat().st_size > _QUICK:
            raise BadInputError(f"metrics.jsonl is large: trainer report {folder} takes its time")
        write_report([folder], folder / NAME)
    except Exception as error:  # whatever it is, the training is done and worth more
        line = redact_text(" ".join(f"{error or type(error).__name__}".split()))
        print(f"trainer: no report was written ({plain(line)})", file=sys.stderr, flush=True)


def report(folders: Sequence[Path], out: Path | None) -> int:
    """Writes a report and says where: by default in the run folder, for several runs here.

    Raises:
        BadInputError: As `write_report`; for a run given twice, or a file that stays.
    """
    for number, folder in enumerate(folders):
        if any(os.path.realpath(folder) == os.path.realpath(other) for other in folders[:number]):
            raise BadInputError(f"{folder}: given twice; leave one out")
    if out is None and len(folders) > 1 and Path(NAME).exists():
        raise BadInputError(f"{NAME}: is there already, of other runs perhaps; give --out FILE")
    out = out or (folders[0] / NAME if len(folders) == 1 else Path(NAME))
    if out.is_dir():
        raise BadInputError(f"--out {out}: is a folder; give a file")
    if out.exists() and not _is_report(out):
        raise BadInputError(f"{out}: is there already, and isn't a report; give another --out")
    started = time.monotonic()
    write_report(folders, out)
    seconds = time.monotonic() - started
    print(f"{plain(str(out), 4096)} ({out.stat().st_size / 1000:,.0f} kB, {seconds:.1f} s)")
    return EXIT_DONE


def _is_report(path: Path) -> bool:
    try:
        if not path.is_file():  # opening a pipe would wait
            return False
        with path.open("rb") as file:
            return MARK.encode() in file.read(_HEAD)
    except OSError:
        return False
