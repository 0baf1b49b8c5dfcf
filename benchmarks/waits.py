"""Time of a step by how OpenMP's threads wait for each other, on a quiet machine and beside busy processes.

When it is loaded, libgomp reads GOMP_SPINCOUNT, the turns of a loop in which a thread waits before it sleeps.
So each side is a process of its own; they take turns, and are stopped (SIGSTOP) in between.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch

from benchmarks.conditions import conditions
from benchmarks.setting import timed_steps
from trainer.config.recipe_file import load_recipe
from trainer.distributed.parallel import World
from trainer.errors import EXIT_DONE
from trainer.host.startup import SPINS
from trainer.train.components.run import build
from trainer.train.components.task import make_task

_BUSY = "while True: pass"
SIDES = {
    "asleep at once (OMP_WAIT_POLICY=PASSIVE)": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"},
    **{f"{spins:,} turns": {"GOMP_SPINCOUNT": str(spins)} for spins in (1_000, SPINS, 100_000, 300_000)},
    "without end (OMP_WAIT_POLICY=ACTIVE)": {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "infinity"},
}


def add_arguments(bench: argparse.ArgumentParser) -> None:
    """Adds the options of the bench."""
    bench.add_argument("recipe", metavar="RECIPE", help="name of a recipe or path of a YAML file")
    bench.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for all sides")
    bench.add_argument("--rounds", type=int, default=7, metavar="N", help="interleaved rounds (default: 7)")
    bench.add_argument("--steps", type=int, default=20, metavar="N", help="in a round (default: 20)")
    bench.set_defaults(run=lambda o: bench_waits(o.recipe, o.set, o.rounds, o.steps))


def bench_waits(recipe: str, settings: Sequence[str], rounds: int, steps: int) -> int:
    """Measures and prints: milliseconds of a step, medians, without and beside one busy process a CPU."""
    print(f"{conditions()}\n{' '.join([recipe, *settings])}: {rounds} rounds of {steps} steps in turns\n")
    found = dict[tuple[str, bool], float]()
    with ExitStack() as stack:
        words = [recipe, str(steps), *settings]
        sides = {name: stack.enter_context(_started(words, how)) for name, how in SIDES.items()}
        for busy in (False, True):
            with ExitStack() as others:
                for _ in range(os.cpu_count() or 1) if busy else ():
                    others.enter_context(_running([sys.executable, "-c", _BUSY]))
                times: dict[str, list[float]] = {name: [] for name in sides}
                for _ in range(rounds):
                    for name, process in sides.items():
                        times[name].append(_turn(process))
            found |= {(name, busy): statistics.median(series) / steps for name, series in times.items()}
    print("| threads wait | quiet, ms | ratio | beside a busy process on each CPU, ms | ratio |")
    print("|---|---|---|---|---|")
    best = {busy: min(found[name, busy] for name in sides) for busy in (False, True)}
    for name in sides:
        cells = [f"{found[name, b] * 1e3:.1f} | {found[name, b] / best[b]:.2f}" for b in (False, True)]
        print(f"| {name} | {' | '.join(cells)} |")
    return EXIT_DONE


@contextmanager
def _running(command: Sequence[str], **options: object) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(command, text=True, **options)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def _started(words: Sequence[str], how: Mapping[str, str]) -> Iterator["subprocess.Popen[str]"]:
    """A process that has prepared a run, and is stopped."""
    given = {name: value for name, value in os.environ.items() if name not in SIDES_VARIABLES}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 1}
    command = [sys.executable, "-m", "benchmarks.waits", *words]
    with _running(command, env={**given, **how}, **pipes) as process:
        for _ in range(2):  # the second turn finds all that the first has made
            _turn(process)
        yield process


SIDES_VARIABLES = {name for how in SIDES.values() for name in how}


def _turn(process: "subprocess.Popen[str]") -> float:
    """Lets a process make its steps; returns the seconds."""
    assert process.stdin is not None and process.stdout is not None
    process.send_signal(signal.SIGCONT)
    process.stdin.write("\n")
    process.stdin.flush()
    seconds = float(process.stdout.readline())
    process.send_signal(signal.SIGSTOP)
    return seconds


def main(recipe: str, steps: str, *settings: str) -> None:
    """Makes steps for each line of standard input, and prints their seconds."""
    length = ["epochs=1000000000", "max_steps=1000000", "data.workers=0"]
    run_recipe = load_recipe(recipe, [*settings, *length])
    threads = run_recipe.parallel.threads
    torch.set_num_threads(len(os.sched_getaffinity(0)) if threads == "auto" else threads)
    world = World(0, 1, 0, torch.device("cpu"), None)
    turn = timed_steps(build(run_recipe, make_task(run_recipe), world, 0), int(steps), world.device)
    for _ in sys.stdin:
        print(turn(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
