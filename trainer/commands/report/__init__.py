"""`trainer report RUN …`: what a run did as one static HTML file, read without JavaScript or a network.

`write` writes the `page`; `read` reads a run folder; the other files are the page's parts.
"""

import argparse
from pathlib import Path
from typing import Any


def add_parser(commands: Any) -> None:
    """Adds `report` to the commands."""
    report = commands.add_parser(
        "report", help="write what a run did as one HTML file; several runs side by side", allow_abbrev=False
    )
    report.add_argument("folders", type=Path, nargs="+", metavar="RUN", help="run folder")
    report.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="replaced if it is a report, and never if it is anything else (default: RUN/report.html; for "
        "several runs ./report.html, if there is none yet)",
    )
    report.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from trainer.commands.report.write import report

    return report(options.folders, options.out)
