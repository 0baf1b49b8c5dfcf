"""`trainer report RUN …`: writes the page of a run, or of several side by side."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.errors import EXIT_DONE, BadInputError, writing
from trainer.host.files import check_replaceable
from trainer.host.latest import run_path
from trainer.observe.console import warn
from trainer.observe.text import plain

_HEAD = 1 << 18  # bytes of a report that its style and its mark are in


def add_parser(commands: Any) -> None:
    """Adds `report` to the commands."""
    report = commands.add_parser(
        "report", help="Write an HTML report of a run, or compare runs.", allow_abbrev=False
    )
    report.add_argument("folders", type=run_path, nargs="+", metavar="RUN", help="run folder, or latest")
    report.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="page to write; only a report is replaced (default: RUN/report.html; for several runs "
        "./report.html, if there is none yet)",
    )
    report.set_defaults(run=lambda options: report_of(options.folders, options.out))


def report_of(folders: Sequence[Path], out: Path | None) -> int:
    """Writes a report and prints its path: by default in the run folder, for several runs here.

    Raises:
        BadInputError: As `write_report`; or if the file exists and is no report of ours.
    """
    from trainer.runs.altered import altered_config, altered_rows
    from trainer.runs.manifest import read_facts
    from trainer.runs.report.write import NAME, write_report

    # `runs/*` has the link runs/latest too: each run once, by its own name.
    once = {os.path.realpath(folder): folder for folder in sorted(folders, key=os.path.islink, reverse=True)}
    folders = [folder for folder in dict.fromkeys(folders) if folder in once.values()]
    if out is None and len(folders) > 1 and Path(NAME).exists():
        raise BadInputError(f"{NAME}: is there already, of other runs perhaps; give --out FILE")
    given, out = out, out or (folders[0] / NAME if len(folders) == 1 else Path(NAME))
    if out.is_dir():
        raise BadInputError(f"--out {out}: is a folder; give a file")
    if out.exists() and not _is_report(out):
        raise BadInputError(f"{out}: is there already, and isn't a report; give another --out")
    if given is not None:
        with writing(str(out), "give another --out"):  # before long records are read
            check_replaceable(out)
    started = time.monotonic()
    write_report(folders, out)
    for folder in folders:
        facts = read_facts(folder)
        for line in (*altered_config(facts), *altered_rows(folder, facts)):
            warn(f"{folder}: {line}")
    seconds = time.monotonic() - started
    print(f"{plain(str(out), 4096)} ({out.stat().st_size / 1000:,.0f} kB, {seconds:.1f} s)")
    return EXIT_DONE


def _is_report(path: Path) -> bool:
    from trainer.runs.report.page import MARK

    try:
        if not path.is_file():  # opening a pipe would wait
            return False
        with path.open("rb") as file:
            return MARK.encode() in file.read(_HEAD)
    except OSError:
        return False
