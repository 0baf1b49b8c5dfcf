"""CPU seconds from `trainer train` to the end of the first step, by phase, beside a plain script's.

Kinds of runs: digits, a custom task with a hook, a timm model on a folder. The script imports the same
libraries, reads the same data and makes one step: by hand, so that it imports no more than the trainer does.
Rounds take turns, so that other load meets all alike; CPU seconds are of all processes, user and
system.
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

import numpy as np
from PIL import Image

from benchmarks.conditions import conditions
from trainer.errors import EXIT_DONE, EXIT_FAILED

_HERE = Path(__file__).parent
_SCRIPT = str(_HERE / "start_plain.py")
_TORCHRUN = ("-m", "torch.distributed.run", "--nnodes=1", "--rdzv-backend=static", "--nproc-per-node=2")
_PAIR_TARGET = 1.75  # two ranks to torchrun with the script
# What a process has reached, and what the seconds since it reached the one before went to.
_LAUNCHER = {
    "validated": "launcher: interpreter, validation",
    "imported": "launcher: imports",
    "launched": "launcher: GPUs, CPUs",
}
_RANK = {
    "imported": "rank: interpreter, imports",
    "data": "rank: data",
    "prepared": "rank: checks, the run folder",
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
        interpreters: How many were started.
        after: CPU seconds from there to the end of the run.
    """

    phases: dict[str, float]
    seconds: float
    modules: tuple[int, int]
    interpreters: int
    after: float = 0.0


def add_arguments(bench: argparse.ArgumentParser) -> None:
    """Adds the options of the bench."""
    bench.add_argument("--rounds", type=int, default=5, metavar="N", help="interleaved rounds (default: 5)")
    bench.add_argument(
        "--target",
        type=float,
        default=1.0,
        metavar="X",
        help="largest ratio to the script (default: 1.0)",
    )
    bench.set_defaults(run=lambda options: bench_start(options.rounds, options.target))


class Kind(NamedTuple):
    """A kind of run that is started.

    Attributes:
        words: Of `trainer train`.
        script: Word of `start_plain.py` for a script with the same work.
    """

    words: tuple[str, ...]
    script: str


KINDS = {
    "digits": Kind(("digits",), "digits"),
    "a custom task with a hook": Kind(("mine.py", "hooks.use=[hook.py:Hook]"), "digits"),
    "a timm model on a folder": Kind(
        (
            *("digits", "data.name=folder", "data.path=photographs", "data.image_size=64"),
            *("data.global_batch_size=8", "data.micro_batch_size=8", "model.name=timm/resnet18"),
        ),
        "folder",
    ),
}


def bench_start(rounds: int = 5, target: float = 1.0) -> int:
    """Measures, prints tables and judges.

    Returns:
        0; 1 if a start takes more than `target` times the CPU seconds of the script that updates by hand, or
        two ranks more than 1.75 times those of torchrun with that script.
    """
    print(f"{conditions()}\nCPU seconds, medians of {rounds} rounds in turns\n", flush=True)
    starts: dict[str, list[Start]] = {name: [] for name in KINDS}
    plain: dict[str, list[float]] = {name: [] for name in KINDS}
    usual, torchs, pairs, plain_pairs = [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for _ in range(rounds):
            for name, kind in KINDS.items():
                starts[name].append(one_start(kind, folder))
                plain[name].append(cpu_seconds([_SCRIPT, kind.script], folder=folder))
            usual.append(cpu_seconds([_SCRIPT, "digits", "adamw"]))
            torchs.append(cpu_seconds(["-c", "import torch"]))
            pairs.append(two_ranks().seconds)
            plain_pairs.append(cpu_seconds([*_TORCHRUN, _SCRIPT, "digits"]))
    print(f"| phase | {' | '.join(KINDS)} |\n|---{'|---' * len(KINDS)}|")
    for phase in starts["digits"][0].phases:
        cells = [f"{statistics.median(one.phases[phase] for one in starts[name]):.2f}" for name in KINDS]
        print(f"| {phase} | {' | '.join(cells)} |")
    totals = {name: [sum(one.phases.values()) for one in starts[name]] for name in KINDS}
    for heading, found in (("to the first step", totals), ("script", plain)):
        print(f"| **{heading}** | {' | '.join(_spread(found[name]) for name in KINDS)} |")
    ratios = {
        name: statistics.median(one / other for one, other in zip(totals[name], plain[name], strict=True))
        for name in KINDS
    }
    print(f"| **ratio** (target: {target:g}) | {' | '.join(f'{ratio:.2f}' for ratio in ratios.values())} |")
    after = [f"{statistics.median(one.after for one in starts[name]):.2f}" for name in KINDS]
    print(f"| after it: evaluation, checkpoint, weights, report | {' | '.join(after)} |")
    clock = [f"{statistics.median(one.seconds for one in starts[name]):.1f}" for name in KINDS]
    print(f"| seconds of the clock to the first step | {' | '.join(clock)} |")
    modules = ["{:,}, {:,}".format(*starts[name][0].modules) for name in KINDS]
    print(f"| modules in the launcher, in the rank | {' | '.join(modules)} |")
    print(f"| interpreters | {' | '.join(str(starts[name][0].interpreters) for name in KINDS)} |\n")
    print("| digits | CPU seconds |\n|---|---|")
    rest = {"script with torch's AdamW": usual, "import torch": torchs}
    rest |= {"two ranks, a whole run of one step": pairs, "the script by torchrun, two ranks": plain_pairs}
    for name, seconds in rest.items():
        print(f"| {name} | {_spread(seconds)} |")
    pair = statistics.median(one / other for one, other in zip(pairs, plain_pairs, strict=True))
    print(f"| **two ranks: ratio** (target: {_PAIR_TARGET:g}) | {pair:.2f} |")
    held = all(ratio <= target for ratio in ratios.values()) and pair <= _PAIR_TARGET
    return EXIT_DONE if held else EXIT_FAILED


def _spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


def prepare(folder: Path) -> None:
    """Writes what the kinds of runs name: a task, a hook and photographs of two classes."""
    subprocess.run(
        [sys.executable, "-m", "trainer", "new", "mine.py"],
        cwd=folder,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    (folder / "hook.py").write_text("class Hook:\n    def after_step(self, row):\n        pass\n")
    for number in range(24):
        split = "train" if number < 16 else "val"
        file = folder / "photographs" / split / f"class-{number % 2}" / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        values = np.random.default_rng(number).integers(0, 255, (160, 200, 3), dtype=np.uint8)
        Image.fromarray(values).save(file)


def one_start(kind: Kind = KINDS["digits"], where: str | None = None) -> Start:
    """Starts a run of one step, and says where its CPU seconds went.

    Args:
        where: Working folder, with the files that `prepare` writes; None: this process's.
    """
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        whole = cpu_seconds(_words(folder, kind), marking(folder), where)
        found = read_marks(Path(folder, "marks").read_text().splitlines(), began)
        return found._replace(after=whole - sum(found.phases.values()))


class Pair(NamedTuple):
    """Measurements of a run of one step on two ranks, to its end.

    Attributes:
        seconds: CPU seconds of all its processes.
        interpreters: How many were started.
        first_imported: Modules that each rank had when it began to train, by its process.
    """

    seconds: float
    interpreters: int
    first_imported: dict[str, int]


def two_ranks() -> Pair:
    """Runs `trainer train digits` for one step by two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*_words(folder), "data.micro_batch_size=32", "--nproc-per-node=2"]
        seconds = cpu_seconds(words, marking(folder))
        marks = [line.split() for line in Path(folder, "marks").read_text().splitlines()]
    launcher = marks[0][1]
    imported = {pid: int(rest[-1]) for name, pid, *rest in marks if name == "imported" and pid != launcher}
    return Pair(seconds, sum(mark[0] == "began" for mark in marks), imported)


def _words(folder: str, kind: Kind = KINDS["digits"]) -> list[str]:
    settings = ["max_steps=1", "parallel.threads=1", "data.workers=0"]
    return ["-m", "trainer", "train", *kind.words, "--quiet", "--out", str(Path(folder, "run")), *settings]


def marking(folder: str) -> dict[str, str]:
    """Variables with which a run notes its phases in `folder/marks`."""
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


def cpu_seconds(
    words: Sequence[str], variables: Mapping[str, str] = MappingProxyType({}), folder: str | None = None
) -> float:
    """Returns the CPU seconds of a Python process with these words, and of its children."""
    process = subprocess.Popen([sys.executable, *words], env={**os.environ, **variables}, cwd=folder)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return used.ru_utime + used.ru_stime
