"""`make mutants`: breaks a copy of the package in known ways; for each, the fast suite's test that fails.

A mutant is a fault that somebody could make: a text of a file and what it becomes, one YAML file for each
room, with the test that is to see it. A test that stays green is a defect; so is a text that is not found.
A test that its fault makes wait for ever is ended after HANG_SECONDS, and has failed.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from trainer.config.yaml_text import parse_yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
HANG_SECONDS = 300


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


def copy_of_checkout(folder: Path) -> Path:
    """Copies the files that git tracks, as they are now, into a new folder."""
    folder.mkdir()
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    words = ["tar", "--null", "-T", "-", "-cf", "-"]
    packed = subprocess.run(words, cwd=ROOT, input=listed, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-xf", "-", "-C", folder], input=packed, check=True)
    return folder


def _seen(mutant: Mutant, copy: Path) -> str:
    """Breaks the copy, runs the test, mends the copy; "" if the test failed, else what happened instead."""
    file = copy / mutant.file
    whole = file.read_text()
    if whole.count(mutant.old) != 1:
        return f"its text stands {whole.count(mutant.old)} times in the file"
    file.write_text(whole.replace(mutant.old, mutant.new))
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    words += ["-o", f"faulthandler_timeout={HANG_SECONDS}"]
    marks = "not slow and not container"
    # To a file: what a broken program leaves behind would keep a pipe open.
    with (
        (copy / "mutant.log").open("w+") as log,
        subprocess.Popen(
            [*words, "-m", marks, mutant.test], cwd=copy, stdout=log, stderr=log, start_new_session=True
        ) as process,
    ):
        code = process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        log.seek(0)
        said = log.read()
    file.write_text(whole)
    return {0: "the test passes", 1: ""}.get(code, said[-500:])


def main() -> int:
    """Runs them, a line each; 1 if one wasn't seen."""
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", default="", metavar="TEXT", help="those whose room or words contain this")
    options = parser.parse_args()
    rooms = {file.stem: read_mutants(file) for file in sorted(HERE.glob("*.yaml"))}
    chosen = [
        (room, mutant)
        for room, mutants in rooms.items()
        for mutant in mutants
        if options.only in f"{room} {mutant.what}"
    ]
    unseen = 0
    with tempfile.TemporaryDirectory(prefix="trainer-mutants-") as folder:
        copy = copy_of_checkout(Path(folder, "copy"))
        for number, (room, mutant) in enumerate(chosen, 1):
            trouble = _seen(mutant, copy)
            unseen += bool(trouble)
            print(f"{number}/{len(chosen)} {room}: {mutant.what}: {trouble or 'seen'}", flush=True)
    print(f"{len(chosen) - unseen} of {len(chosen)} were seen")
    return bool(unseen)


if __name__ == "__main__":
    sys.exit(main())
