"""The record of how a rank ended: ranks leave it, launchers read it, nodes pass it on; and its words."""

import json
import queue
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, EXIT_HANG, EXIT_REQUEUE

TORCHRUN = -1  # the "rank" of an outcome that is torchrun's own

_MAYBE_MEMORY = " (out of memory? see dmesg)"
_HINTS = {
    signal.SIGKILL: _MAYBE_MEMORY,
    signal.SIGBUS: " (is /dev/shm full?)",
    signal.SIGSEGV: " (a fault in native code)",
}

# What torch's DataLoader raises for a worker that died, in whatever the rank was doing; Python's word, if its
# signal handler could not raise it.
_DEAD_WORKER = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) "
    r"(?:is killed by signal: (?P<signal>[^.]+)|exited unexpectedly(?: with exit code (?P<code>\d+))?)"
)
_NUMBERS = {signal.strsignal(number): number for number in signal.Signals}


@dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    Attributes:
        rank: Its global number.
        code: The exit code that it means (see `trainer.errors`).
        line: One line for people; empty if there is nothing to say.
        traceback: The traceback of what it raised or crashed with, or where it hangs; empty otherwise.
        time: When it ended, by the host's monotonic clock, in seconds; infinite if nobody knows.
        for_all: Whether the line speaks for the whole job (bad input, a stop that was asked for, a hang).
        consequence: Whether it looks like the effect of another rank's end.
    """

    rank: int
    code: int
    line: str = ""
    traceback: str = ""
    time: float = float("inf")
    for_all: bool = False
    consequence: bool = False


def read_outcome(folder: Path, rank: int) -> Outcome:
    """The outcome that a rank left; FileNotFoundError if there is none yet."""
    return Outcome(**json.loads((folder / f"rank-{rank}.json").read_text()))


def read_torchrun(folder: Path, exit_code: int) -> tuple[dict[int, int], str]:
    """The exit codes of the ranks that torchrun found failed, and what went wrong in torchrun itself."""
    try:
        told = json.loads((folder / "torchrun.json").read_text())
    except FileNotFoundError:
        return {}, f"{ending(exit_code)}\n"
    return {int(rank): code for rank, code in told["exits"].items()}, told["error"]


def job_code(outcomes: Sequence[Outcome]) -> int:
    """The exit code of a job whose ranks ended like this."""
    codes = {outcome.code for outcome in outcomes}
    for code in (EXIT_BAD_INPUT, EXIT_HANG):
        if code in codes:
            return code
    if codes - {EXIT_DONE, EXIT_REQUEUE}:
        return EXIT_FAILED
    return EXIT_REQUEUE if EXIT_REQUEUE in codes else EXIT_DONE


def explain(outcomes: Sequence[Outcome], world: int) -> str:
    """What to tell the user of a job whose ranks ended like this: the cause, once; else nothing."""
    code = job_code(outcomes)
    bad = [outcome for outcome in outcomes if outcome.code not in (EXIT_DONE, EXIT_REQUEUE)]
    candidates = [outcome for outcome in bad if code in (outcome.code, EXIT_FAILED)]
    if not candidates:
        return ""
    cause = min(candidates, key=lambda outcome: (outcome.consequence, outcome.time, outcome.rank))
    if cause.for_all:
        return f"trainer: {cause.line}\n{cause.traceback}"
    who = "torchrun" if cause.rank == TORCHRUN else f"rank {cause.rank} of {world}"
    line = cause.line or f"ended with exit code {cause.code}"
    text = f"trainer: {who} failed:\n{cause.traceback}" if cause.traceback else f"trainer: {who}: {line}\n"
    others = [str(rank) for rank in sorted({outcome.rank for outcome in bad} - {cause.rank, TORCHRUN})]
    if others:
        text += f"trainer: as a consequence failed or was stopped: rank {', '.join(others)}\n"
    return text


def ending(exit_code: int) -> str:
    """An exit code of a process in words; negative: the signal that killed it."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    if -exit_code not in list(signal.Signals):
        return f"was killed by signal {-exit_code}"
    number = signal.Signals(-exit_code)
    return f"was killed by {number.name}{_HINTS.get(number, '')}"


def crashed(folder: Path, rank: int, exit_code: int) -> Outcome:
    """The outcome of a rank that ended without a word; what a fault in native code wrote is its traceback."""
    file = folder / f"rank-{rank}.fault"
    fault = file.read_text() if file.exists() else ""
    trace = f"{ending(exit_code)}\n{fault}" if fault else ""
    # Nobody but the kernel or a person kills so, while the launcher waits: it is never another rank's doing.
    time = 0.0 if exit_code == -signal.SIGKILL else float("inf")
    return Outcome(rank, EXIT_FAILED, ending(exit_code), trace, time)


def by_memory(outcome: Outcome, words: str) -> Outcome:
    """An outcome by SIGKILL, where it is known that memory was full: says so in these words."""
    line, trace = (text.replace(_MAYBE_MEMORY, words) for text in (outcome.line, outcome.traceback))
    return replace(outcome, line=line, traceback=trace)


def dead_worker(error: BaseException) -> str:
    """One line about the loader worker whose death raised this.

    "" for any other error, also if a worker died while it was being handled.
    """
    while before := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        if isinstance(before, queue.Empty):  # as which torch's waiting for a batch begins
            break
        error = before
    found = _DEAD_WORKER.search(str(error))
    if found is None:
        return ""
    number = _NUMBERS.get((found["signal"] or "").strip())
    how = "ended unexpectedly"
    if found["code"]:
        how = ending(int(found["code"]))
    elif found["signal"]:
        how = ending(-number) if number else f"was killed by {found['signal']}"
    return f"its loader worker (pid {found[1]}) {how}"
