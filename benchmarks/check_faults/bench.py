"""Does `trainer check` see the faults of `faults`?

As a module it is a process that the check starts, with a fault in it.
"""

import argparse
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

from benchmarks.check_faults.faults import BY_NAME, FAULTS, KNOWN_TASKS, task_of
from trainer.commands.check import rank
from trainer.commands.check.check import deterministic
from trainer.commands.check.exchange import launched
from trainer.commands.check.training import Subject, open_subject
from trainer.commands.check.variants import BAD, VariantLaunch, VariantRow
from trainer.commands.check.verdicts import check_all
from trainer.config.suggest import nearest
from trainer.errors import EXIT_DONE, EXIT_FAILED, BadInputError
from trainer.launch.worker import Worker

_MODULE, _CLEAN = "benchmarks.check_faults.bench", "trainer.commands.check.rank"


@dataclass(frozen=True)
class SeenFault:
    """Result of the check with a fault in the trainer.

    Attributes:
        fault: Name of the fault; "": none, with each task.
        what: What is wrong.
        seen: Whether a variant differs or crashes; without a fault, whether none does.
        rows: The variants that were run.
    """

    fault: str
    what: str
    seen: bool
    rows: tuple[VariantRow, ...]


def self_test(tell: Callable[[str], object], only: Collection[str] = ()) -> Iterator[SeenFault]:
    """Puts in one fault after another, and checks its task with the variants that must see it.

    Before them each task is checked with all these variants and no fault, where none may differ.

    Args:
        tell: Called with what is tried.
        only: Names of faults; empty: all.
    """
    chosen = [fault for fault in FAULTS if not only or fault.name in only]
    for task in KNOWN_TASKS:
        mine = [fault for fault in chosen if fault.task == task]
        if not mine:
            continue
        recipe = task_of(task)
        subject = open_subject(f"self-test/{task}", recipe)
        names = tuple(dict.fromkeys(name for fault in mine for name in fault.seen_by))
        tell(f"{task}: no fault")
        rows = _rows(subject, names, "")
        yield SeenFault("", f"none, in the task {task}", not _bad(rows), rows)
        for fault in mine:
            tell(f"{task}: {fault.what}")
            with nullcontext() if fault.there else fault.put_in():
                rows = _rows(subject, fault.seen_by, fault.name)
            yield SeenFault(fault.name, fault.what, _bad(rows), rows)


def _rows(subject: Subject, names: tuple[str, ...], fault: str) -> tuple[VariantRow, ...]:
    module, more = (_MODULE, {"fault": fault}) if fault else (_CLEAN, {})
    launches: dict[str, VariantLaunch | str] = {
        "ranks": launched(2, module, more),
        "fresh": launched(1, module, more),
    }
    return tuple(check_all(subject, names, launches, lambda _: None))


def _bad(rows: tuple[VariantRow, ...]) -> bool:
    return any(row.verdict in BAD for row in rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument(
        "--only", action="append", default=[], metavar="FAULT", help="put in only this fault (repeatable)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints a line for each fault; returns 1 if one isn't seen, or a task without a fault differs."""
    for one in options.only:
        if one not in BY_NAME:
            raise BadInputError(f"--only {one}: no such fault{nearest(one, BY_NAME)}")
    found = list[SeenFault]()
    with deterministic(str):
        for one in self_test(str, options.only):
            found.append(one)
            by = ", ".join(row.name for row in one.rows if row.verdict in BAD)
            clean = "clean" if one.seen else "FALSE ALARM"
            result = (f"seen by {by}" if by else "MISSED") if one.fault else clean
            print(f"  {one.fault or '-':<26} {result:<24} {one.what}", flush=True)
    missed = [one for one in found if not one.seen]
    print(f"  {len(found) - len(missed)} of {len(found)} as they must be")
    return EXIT_FAILED if missed else EXIT_DONE


if __name__ == "__main__":
    with Worker(sys.argv[1]) as worker:
        worker.code = rank.main(worker.request, BY_NAME[worker.request["fault"]].put_in())
    sys.exit(worker.exit_code)
