"""`make mutants`: breaks a copy of the package in known ways; for each, the fast suite's test that fails.

A mutant is a fault that somebody could make: a text of a file and what it becomes, one YAML file for each
room, with the test that is to see it. A test that stays green is a defect; so is a text that is not found.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.mutants.runner import Copy, in_jobs
from trainer.config.yaml_text import parse_yaml

HERE = Path(__file__).parent
_SECONDS = 300.0


class Mutant(NamedTuple):
    """A fault: `old` stands once in `file` and becomes `new`; `test` is to fail. `what` says it in words."""

    what: str
    file: str
    old: str
    new: str
    test: str


def read_mutants(file: Path) -> list[Mutant]:
    """The faults of a room."""
    return [Mutant(**entry) for entry in parse_yaml(file.read_text(), file.name)]


def _seen(mutant: Mutant, copy: Copy) -> str:
    """Tries a mutant with its test; "" if the test failed, else what happened instead."""
    whole = (copy.folder / mutant.file).read_text()
    if whole.count(mutant.old) != 1:
        return f"its text stands {whole.count(mutant.old)} times in the file"
    tried = copy.try_mutant(
        mutant.file, whole.replace(mutant.old, mutant.new), [mutant.test], _SECONDS, first=True
    )
    return "" if tried.saw else "the test passes" if tried.began else "there is no such test"


def main() -> int:
    """Runs them, a line each; 1 if one wasn't seen."""
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", default="", metavar="TEXT", help="those whose room or words contain this")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at once")
    options = parser.parse_args()
    rooms = {file.stem: read_mutants(file) for file in sorted(HERE.glob("*.yaml"))}
    both = [(room, mutant) for room, mutants in rooms.items() for mutant in mutants]
    chosen = [(room, mutant) for room, mutant in both if options.only in f"{room} {mutant.what}"]

    def work(mutants: Sequence[tuple[str, Mutant]], copy: Copy) -> int:
        unseen = 0
        for room, mutant in mutants:
            trouble = _seen(mutant, copy)
            unseen += bool(trouble)
            print(f"{room}: {mutant.what}: {trouble or 'seen'}", flush=True)
        return unseen

    unseen = in_jobs(chosen, options.jobs, work)
    print(f"{len(chosen) - unseen} of {len(chosen)} were seen")
    return bool(unseen)


if __name__ == "__main__":
    sys.exit(main())
