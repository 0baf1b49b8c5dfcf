"""Trainings are slowed in known ways, and must say themselves what slows them.

Each case is a run of the real command line (`trainer train …`) with something slow put around it. What counts
is its last verdict. Needs Linux, gcc, and for control groups and network namespaces root.
"""

import argparse
import os
import random
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.conditions import conditions
from benchmarks.slowdowns import bases, gpu, record
from benchmarks.slowdowns.cases import FIRST, Case
from benchmarks.slowdowns.healthy import HEALTHY
from benchmarks.slowdowns.held_out import HELD_OUT
from benchmarks.slowdowns.page import Result, page
from benchmarks.slowdowns.run import execute

WORK = Path(tempfile.gettempdir(), "trainer-slowdowns")
# CPUs' worth of time that others may use before a run says nothing about what was put into it.
_OTHERS = 0.3


class _Used(NamedTuple):
    """CPU seconds of the machine and of this process and its children, and the clock."""

    machine: float
    own: float
    clock: float

    @staticmethod
    def now() -> "_Used":
        words = Path("/proc/stat").read_text().split()[1:9]
        user, nice, system, _, _, irq, soft, steal = (int(word) for word in words)
        busy = (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return _Used(busy, sum(u.ru_utime + u.ru_stime for u in usages), time.monotonic())

    def others_since(self, earlier: "_Used") -> float:
        """CPUs' worth of time that was neither ours nor idle."""
        busy, own = self.machine - earlier.machine, self.own - earlier.own
        return max(0.0, busy - own) / max(self.clock - earlier.clock, 1e-9)


def _wait_for_quiet(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        before = _Used.now()
        time.sleep(1.0)
        if _Used.now().others_since(before) < _OTHERS:
            return


def run_case(case: Case, work: Path, patience: float = 60.0, attempts: int = 3) -> Result:
    """Runs a case; again where other processes of the machine had a part in it, whatever it said."""
    for attempt in range(1, attempts + 1):
        _wait_for_quiet(patience)
        before = _Used.now()
        settings = (f"max_steps={case.steps}", *case.settings)
        ending = execute(case.recipe, settings, case.injections, work, case.name, case.ranks)
        others = _Used.now().others_since(before)
        if others < _OTHERS or attempt == attempts:
            break
        print(f"  {case.name}: others used {others:.1f} CPUs, and it said {ending.verdict}", flush=True)
    kept = None
    if ending.code == 0 and ending.verdict:
        about = {"samples_per_s": ending.samples_per_s, "seconds": ending.seconds}
        about |= {"others": others, "attempt": attempt}
        folder = work / "runs" / case.name
        kept = record.record_of(case.name, case.cause, case.also, ending, folder, about)
    end = ending.text.strip().splitlines()[-1:] if ending.code else []
    return Result(case, kept, "".join(end))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--only", action="append", help="cases whose name has this in it; '': none")
    parser.add_argument("--out", type=Path, help="page of results")
    parser.add_argument("--work", type=Path, default=WORK, help=f"folder for data and runs (default: {WORK})")
    parser.add_argument("--record", action="store_true", help="keep the figures of each in tests/verdicts")
    parser.add_argument("--recorded", action="store_true", help="on the page also those recorded earlier")
    parser.add_argument("--missing", action="store_true", help="only those without an undisturbed record")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for a quiet machine")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of steps")
    parser.add_argument("--attempts", type=int, default=3, help="how often to run a disturbed case")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs cases, prints each, writes the page; 1 if too few were named or a healthy run got a verdict."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and take everything away
    bases.prepare(options.work)
    undisturbed = {
        kept.name for kept in record.read_all() if kept.run.get("others", 1.0) < _OTHERS and options.missing
    }
    chosen = [
        case
        for case in (*FIRST, *HELD_OUT, *HEALTHY)
        if options.only is None or any(part in case.name for part in options.only if part)
        if case.name not in undisturbed
    ]
    random.Random(0).shuffle(chosen)  # what else the machine does falls on all kinds
    if options.scale != 1:
        chosen = [case._replace(steps=max(4, round(case.steps * options.scale))) for case in chosen]
    results = list[Result]()
    for number, case in enumerate(chosen, 1):
        result = run_case(case, options.work, options.patience, options.attempts)
        results.append(result)
        print(f"{number}/{len(chosen)} {result.line}", flush=True)
        if options.record and result.kept is not None:
            record.write(result.kept)
    if options.recorded:
        kept = {one.name: one for one in record.read_all()}
        results += [
            Result(case, kept.get(case.name), "" if case.name in kept else "no recorded run")
            for case in (*FIRST, *HELD_OUT, *HEALTHY)
            if case.name not in {one.name for one in chosen}
        ]
    places = {case.name: place for place, case in enumerate((*FIRST, *HELD_OUT, *HEALTHY))}
    results.sort(key=lambda result: places[result.case.name])
    spent = sum(result.of_run("seconds") for result in results)
    text, passed = page(results, list(gpu.records()), f"{conditions()}; {len(results)} runs in {spent:.0f} s")
    print(text)
    if options.out:
        options.out.write_text(text)
    return 0 if passed or options.only else 1
