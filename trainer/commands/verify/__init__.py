"""`trainer verify RUN`: trains a run again, elsewhere, and compares the bits.

- `replay`: trains the run again in another folder
- `verdict`: reports identity, or the first difference
"""

import argparse
from typing import Any

from trainer.host.latest import run_path
from trainer.runs.flags import add_settings, add_task


def add_parser(commands: Any) -> None:
    """Adds `verify` to the commands."""
    verify = commands.add_parser(
        "verify",
        help="Train a run again and compare every bit. Exit code 1: they differ.",
        allow_abbrev=False,
    )
    add = verify.add_argument
    add("folder", type=run_path, metavar="RUN", help="run folder, or latest; it isn't changed")
    add("--steps", type=int, metavar="N", help="number of steps to train (default: up to the last record)")
    add_settings(verify, "key that doesn't affect results, such as data.path")
    add("--gpus", metavar="N|LIST", help="number of GPUs or their indices (default: as many as the run had)")
    add("--nproc-per-node", type=int, metavar="N", help="number of CPU processes (default: as the run had)")
    add_task(verify)
    verify.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from trainer.runs.manifest import check_current, read_run

    # What is no run of this version is said before torch is imported.
    check_current(options.folder, read_run(options.folder).manifest)
    from trainer.commands.verify.verify import verify

    return verify(options)
