"""`trainer check RECIPE`: a few steps as the trainer trains them and as plain PyTorch does, compared.

- `plain`, `formulas`: the reference, to be read: a loop of its own that imports nothing of what it checks
- `order`: three epochs of the samples' order
- `happened`: what must have happened in a variant, so that it says something
- `compare`: the first tensor that differs by more than rounding, and after which step
- `training`: the same steps by the trainer; few samples, in float64
- `variants`: what is changed, one thing at a time
- `verdicts`: trains the variants, and gives the verdict on each
- `rank`, `exchange`: variants that need processes of their own
- `check`: the request and the table

benchmarks/check_faults puts known faults in, one at a time: does the check see them?
"""

import argparse
from typing import Any

from trainer.runs.flags import add_settings


def add_parser(commands: Any) -> None:
    """Adds `check` to the commands."""
    check = commands.add_parser(
        "check",
        help="Compare training with plain PyTorch, tensor by tensor. Exit code 1: they differ.",
        allow_abbrev=False,
    )
    check.add_argument("recipe", metavar="RECIPE", help="recipe, YAML file, or Python file with a task")
    add_settings(check, "change a key")
    check.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help="run only this comparison, such as plain, ema or ranks-ddp (repeatable)",
    )
    check.add_argument("--json", action="store_true", help="print JSON")
    check.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from trainer.commands.check.check import run_check

    return run_check(options)
