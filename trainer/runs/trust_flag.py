"""The flag `--trust` of each command that is given a run; imports nothing."""

import argparse


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Adds it."""
    parser.add_argument(
        "--trust",
        action="store_true",
        help="run the Python code that the run names (task, hooks, sinks), though neither you began that run "
        "nor this command names the files: read them first",
    )
