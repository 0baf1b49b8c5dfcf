"""`trainer check --self-test`: does the check see the faults of `faults`?"""

from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

from trainer.commands.check.exchange import launched
from trainer.commands.check.faults import FAULTS, KNOWN_TASKS, task_of
from trainer.commands.check.training import Subject, open_subject
from trainer.commands.check.variants import BAD, VariantLaunch, VariantRow
from trainer.commands.check.verdicts import check_all


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
    launches: dict[str, VariantLaunch | str] = {"ranks": launched(2, fault), "fresh": launched(1, fault)}
    return tuple(check_all(subject, names, launches, lambda _: None))


def _bad(rows: tuple[VariantRow, ...]) -> bool:
    return any(row.verdict in BAD for row in rows)
