"""Flags that several commands have; imports nothing of the package."""

import argparse


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Adds `--trust`, for a command that is given a run."""
    parser.add_argument(
        "--trust",
        action="store_true",
        help="run the Python code that the run names (task, hooks, sinks), though neither you began that run "
        "nor this command names the files: read them first",
    )


def add_settings(parser: argparse.ArgumentParser, about: str = "override a key") -> None:
    """Adds `--set KEY=VALUE`."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help=f"{about}; repeatable"
    )
