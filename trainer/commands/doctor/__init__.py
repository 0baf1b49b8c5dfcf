"""`trainer doctor`: finds faults of the machine, container and configuration before a run meets them.

It never imports torch, which may be what is broken. `doctor` reads the machine into `facts`, runs the checks
(`gpu`, `software`, `machine`) and prints the findings.
"""

import argparse
from pathlib import Path
from typing import Any

from trainer.runs.flags import add_settings


def add_parser(commands: Any) -> None:
    """Adds `doctor` to the commands."""
    doctor = commands.add_parser(
        "doctor", help="Check this machine. Exit code 1: a check failed.", allow_abbrev=False
    )
    doctor.add_argument(
        "recipe", nargs="?", metavar="RECIPE", help="recipe whose data and memory are checked"
    )
    add_settings(doctor)
    doctor.add_argument("--out", type=Path, metavar="DIR", help="run folder (default: runs)")
    doctor.add_argument("--json", action="store_true", help="print every check as JSON")
    doctor.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from trainer.commands.doctor.doctor import doctor

    return doctor(options)
