"""Flags that several commands have."""

import argparse
import json
from pathlib import Path

from trainer.config.task_file import is_task_file


def add_settings(parser: argparse.ArgumentParser, about: str = "override a key") -> None:
    """Adds `--set KEY=VALUE`."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help=f"{about}; repeatable"
    )


def add_task(parser: argparse.ArgumentParser) -> None:
    """Adds `--task FILE[:CLASS]`, which is `--set task=…`, for a command that is given a run."""
    parser.add_argument(
        "--task",
        dest="set",
        action="append",
        default=[],
        type=_as_setting,
        metavar="FILE[:CLASS]",
        help="file of the run's custom task: a run folder names no code",
    )


def add_coco(parser: argparse.ArgumentParser) -> None:
    """Adds `--coco FILE`."""
    parser.add_argument(
        "--coco", type=Path, metavar="FILE", help="write a detector's boxes as COCO's results file (JSON)"
    )


def _as_setting(task: str) -> str:
    if not is_task_file(task):
        raise argparse.ArgumentTypeError(f"{task!r}: give FILE.py, or FILE.py:CLASS")
    return f"task={json.dumps(str(Path(task).absolute()), ensure_ascii=False)}"
