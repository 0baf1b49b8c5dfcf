"""Options that several benches take on the command line."""

import argparse
from collections.abc import Collection

from trainer.config.suggest import nearest
from trainer.errors import BadInputError


def at_least_one(text: str) -> int:
    """Reads a number of rounds, steps or processes from the command line."""
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a whole number from 1 on")
    return int(text)


def add_rounds(bench: argparse.ArgumentParser, rounds: int) -> None:
    """Adds --rounds to a bench's options."""
    about = f"interleaved rounds (default: {rounds})"
    bench.add_argument("--rounds", type=at_least_one, default=rounds, metavar="N", help=about)


def picked(text: str, known: Collection[str], option: str, kind: str) -> list[str]:
    """Reads names that are separated by commas.

    Args:
        text: What was given.
        known: The names that there are.
        option: Of the command line.
        kind: What has these names.

    Raises:
        BadInputError: For one that isn't known.
    """
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            there = f"(there are: {', '.join(known)})"
            raise BadInputError(f"{option}: no {kind} is called '{name}'{nearest(name, known)} {there}")
    return wanted
