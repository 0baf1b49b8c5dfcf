"""CPU seconds from `trainer train digits` to the end of the first step, by phase, beside a plain script's.

The script imports the same libraries, reads the same digits and makes one step: by hand, so that it imports
no more than the trainer does, and with torch's AdamW, as scripts are. Rounds take turns, so that what else
the machine does meets all alike; CPU seconds are of user and system, of all processes.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from trainer.errors import EXIT_DONE, EXIT_FAILED
from trainer.observe.conditions import conditions

_HERE = Path(__file__).parent
_SCRIPT = str(_HERE / "start_plain.py")
# What a process has reached, and what the seconds since it reached the one before went to.
_LAUNCHER = {
    "validated": "launcher: interpreter, validation",
    "imported": "launcher: imports",
    "data": "launcher: data",
    "launched": "launcher: checks, the run folder",
}
_RANK = {
    "imported": "rank: interpreter, imports",
    "data": "rank: data",
    "model": "rank: model, optimizer, loaders",
    "stepped": "rank: outputs, first step",
}
WAITING = "launcher: waiting for the rank"


class Mark(NamedTuple):
    """A line of `start_site`: see there."""

    name: str
    pid: int
    cpu: float
    parent: float
    clock: float
    modules: int


class Start(NamedTuple):
    """Measurements of a start.

    Attributes:
        phases: CPU seconds of each, in their order.
        seconds: Of the clock, from the command to the end of the first step.
        modules: How many the launcher and the rank had imported.
        interpreters: How many were started; a fork isn't.
    """

    phases: dict[str, float]
    seconds: float
    modules: tuple[int, int]
    interpreters: int


def add_arguments(bench: argparse.ArgumentParser) -> None:
    """Adds the options of the bench."""
    bench.add_argument("--rounds", type=int, default=5, metavar="N", help="interleaved rounds (default: 5)")
    bench.add_argument(
        "--target",
        type=float,
        default=1.2,
        metavar="X",
        help="largest ratio to the script (default: 1.2)",
    )
    bench.set_defaults(run=lambda options: bench_start(options.rounds, options.target))


def bench_start(rounds: int = 5, target: float = 1.2) -> int:
    """Measures, prints a table and judges.

    Returns:
        0; 1 if a start takes more than `target` times the CPU seconds of the script that updates by hand.
    """
    print(f"{conditions()}\nCPU seconds, medians of {rounds} rounds in turns\n", flush=True)
    starts, plain, usual, torchs, pairs, plain_pairs = [], [], [], [], [], []
    for _ in range(rounds):
        starts.append(one_start())
        plain.append(cpu_seconds([_SCRIPT, "by-hand"]))
        usual.append(cpu_seconds([_SCRIPT]))
        torchs.append(cpu_seconds(["-c", "import torch"]))
        pairs.append(two_ranks().seconds)
        plain_pairs.append(cpu_seconds([_SCRIPT, "by-hand"]) + cpu_seconds([_SCRIPT, "by-hand"]))
    print("| phase | CPU seconds |\n|---|---|")
    for name in starts[0].phases:
        print(f"| {name} | {statistics.median(start.phases[name] for start in starts):.2f} |")
    totals = [sum(start.phases.values()) for start in starts]
    found = {"to the first step": totals, "script": plain, "script with AdamW": usual, "import torch": torchs}
    found |= {"two ranks, a whole run of one step": pairs, "the script twice": plain_pairs}
    for name, seconds in found.items():
        print(f"| {name} | {statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f}) |")
    ratio = statistics.median(one / other for one, other in zip(totals, plain, strict=True))
    launcher, rank = starts[0].modules
    print(
        f"\n{ratio:.2f} times the script (target: {target:g}); {launcher:,} modules in the launcher, "
        f"{rank:,} in the rank; {statistics.median(start.seconds for start in starts):.1f} s of the clock"
    )
    return EXIT_DONE if ratio <= target else EXIT_FAILED


def one_start() -> Start:
    """Starts `trainer train digits` for one step, and says where its CPU seconds went."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        cpu_seconds(_words(folder), _marking(folder))
        return read_marks(Path(folder, "marks").read_text().splitlines(), began)


class Pair(NamedTuple):
    """Measurements of a run of one step on two ranks, to its end.

    Attributes:
        seconds: CPU seconds of all its processes.
        interpreters: How many were started; a fork isn't.
        first_imported: Modules that each rank had when it began to train, by its process.
    """

    seconds: float
    interpreters: int
    first_imported: dict[str, int]


def two_ranks() -> Pair:
    """Runs `trainer train digits` for one step by two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*_words(folder), "data.micro_batch_size=32", "--nproc-per-node=2"]
        seconds = cpu_seconds(words, _marking(folder))
        marks = [line.split() for line in Path(folder, "marks").read_text().splitlines()]
    launcher = marks[0][1]
    imported = {pid: int(rest[-1]) for name, pid, *rest in marks if name == "imported" and pid != launcher}
    return Pair(seconds, sum(mark[0] == "began" for mark in marks), imported)


def _words(folder: str) -> list[str]:
    settings = ["max_steps=1", "parallel.threads=1", "data.workers=0"]
    return ["-m", "trainer", "train", "digits", "--quiet", "--out", str(Path(folder, "run")), *settings]


def _marking(folder: str) -> dict[str, str]:
    paths = [str(_HERE / "start_site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"START_MARKS": str(Path(folder, "marks")), "PYTHONPATH": os.pathsep.join(paths)}


def read_marks(lines: Sequence[str], began: float) -> Start:
    """Makes phases of what launcher and rank have noted.

    Args:
        lines: In the order in which they were noted, the launcher's first; see `start_site`.
        began: The clock when the command was given.
    """
    found = [
        Mark(name, int(pid), float(cpu), float(parent), float(clock), int(modules))
        for name, pid, cpu, parent, clock, modules in map(str.split, lines)
    ]
    mine = {mark.name: mark for mark in found if mark.pid == found[0].pid}
    ranks = {mark.name: mark for mark in found if mark.pid != found[0].pid}
    phases: dict[str, float] = {}
    for names, marks in ((_LAUNCHER, mine), (_RANK, ranks)):
        before = 0.0
        for name, phase in names.items():
            phases[phase], before = marks[name].cpu - before, marks[name].cpu
    last = ranks["stepped"]
    phases[WAITING] = last.parent - mine["launched"].cpu
    interpreters = sum(mark.name == "began" for mark in found)
    return Start(phases, last.clock - began, (mine["launched"].modules, last.modules), interpreters)


def cpu_seconds(words: Sequence[str], variables: Mapping[str, str] = MappingProxyType({})) -> float:
    """CPU seconds of a Python with these words, from its start to its end, and of what it started."""
    process = subprocess.Popen([sys.executable, *words], env={**os.environ, **variables})
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return used.ru_utime + used.ru_stime
