"""Exit records of ranks, written by ranks and read by launchers; their messages, also to a pod."""

import contextlib
import json
import math
import os
import queue
import re
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.config.redact import redact_text
from trainer.errors import (
    EXIT_BAD_INPUT,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_HANG,
    EXIT_REQUEUE,
    BadInputError,
    DivergedError,
    LostPeerError,
    OutOfMemory,
    OwnCodeError,
    StopRun,
)
from trainer.launch.signals import Stopped

TORCHRUN = -1  # the "rank" of a record that is torchrun's own

_DUMP = "Timeout ("  # as each dump of faulthandler begins

_MAYBE_MEMORY = " (out of memory? see dmesg)"
_HINTS = {
    signal.SIGKILL: _MAYBE_MEMORY,
    signal.SIGBUS: " (is /dev/shm full?)",
    signal.SIGSEGV: " (a fault in native code)",
}

# What the end of a traceback says where another rank left first: such a failure is not the cause.
_CONSEQUENCES = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "failed to recv, got 0 bytes",
    "remote process exited",
    "ncclRemoteError",
    "communicator was aborted",
)

# What torch's DataLoader raises for a worker that died, in whatever the rank was doing; Python's word, if its
# signal handler could not raise it.
_DEAD_WORKER = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) "
    r"(?:is killed by signal: (?P<signal>[^.]+)|exited unexpectedly(?: with exit code (?P<code>\d+))?)"
)
_NUMBERS = {signal.strsignal(number): number for number in signal.Signals}


@dataclass(frozen=True)
class ExitRecord:
    """Record of how one rank ended.

    Attributes:
        rank: Its global number.
        code: Its exit code (see `trainer.errors`).
        line: One line for the user; may be empty.
        traceback: The traceback of its exception or crash, or of the main thread in a hang; empty otherwise.
        time: Time of its end in seconds, by the host's monotonic clock; infinite if unknown.
        for_all: Whether the line speaks for the whole job (bad input, a requested stop, a hang).
        consequence: Whether it looks like the effect of another rank's end.
        told: Whether code and line are those that a rank which failed has left for all.
        stopped: Whether a signal ended it before it trained.
    """

    rank: int
    code: int
    line: str = ""
    traceback: str = ""
    time: float = float("inf")
    for_all: bool = False
    consequence: bool = False
    told: bool = False
    stopped: bool = False


def record_of(rank: int, code: int | None, error: BaseException | None) -> ExitRecord:
    """Makes the exit record of a rank.

    BadInputError means 2, but 1 after steps were trained; Stopped, StopRun, DivergedError and OutOfMemory 1,
    each with one line; OwnCodeError 1 with a line and a traceback; any other exception means 1 with its
    traceback.

    Args:
        rank: Its global number.
        code: The exit code if nothing was raised; None: 0.
        error: What was raised, if anything was.
    """
    now = time.monotonic()
    if error is None:
        return ExitRecord(rank, code or EXIT_DONE, time=now)
    if isinstance(error, BadInputError):
        line, trace = " ".join(str(error).split()), getattr(error, "trace", "")
        code = EXIT_FAILED if isinstance(error, OwnCodeError) or error.late else EXIT_BAD_INPUT
        return ExitRecord(rank, code, line, trace, now, for_all=True)
    if isinstance(error, Stopped | StopRun | DivergedError | OutOfMemory):
        for_all = not isinstance(error, OutOfMemory)  # which can be of one rank alone
        return ExitRecord(rank, EXIT_FAILED, str(error), time=now, for_all=for_all)
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return ExitRecord(rank, error.code or EXIT_DONE, time=now)
        return ExitRecord(rank, EXIT_FAILED, str(error.code), time=now)
    return _lost(rank, error, now) if isinstance(error, LostPeerError) else _raised(rank, error, now)


def _lost(rank: int, error: LostPeerError, now: float) -> ExitRecord:
    code = error.code or (EXIT_REQUEUE if error.saved else EXIT_FAILED)
    line = f"{error}; the same command resumes from the newest checkpoint" if error.saved else str(error)
    return ExitRecord(rank, code, line, "", now, True, True, error.code is not None)


def _raised(rank: int, error: BaseException, now: float) -> ExitRecord:
    if dead := dead_worker(error):
        return ExitRecord(rank, EXIT_FAILED, dead, time=now)
    # Without the frame that made this process a rank.
    frames = error.__traceback__ and (error.__traceback__.tb_next or error.__traceback__)
    text = "".join(traceback.format_exception(type(error), error, frames))
    line = traceback.format_exception_only(type(error), error)[-1].strip()
    # Those of torch.distributed are RuntimeErrors; a connection of the user's code raises OSError.
    consequence = isinstance(error, RuntimeError) and any(sign in text[-2000:] for sign in _CONSEQUENCES)
    return ExitRecord(rank, EXIT_FAILED, line, text, now, consequence=consequence)


def read_exit_record(folder: Path, rank: int) -> ExitRecord:
    """Reads the exit record of a rank; FileNotFoundError if there is none yet."""
    return ExitRecord(**json.loads((folder / f"rank-{rank}.json").read_text()))


def read_torchrun(folder: Path, exit_code: int) -> tuple[dict[int, int], ExitRecord | None]:
    """Returns the exit codes of ranks that torchrun reports as failed, and a record of what failed before."""
    try:
        report = json.loads((folder / "torchrun.json").read_text())
    except FileNotFoundError:
        return {}, ExitRecord(TORCHRUN, EXIT_FAILED, traceback=f"{ending(exit_code)}\n")
    record = None if report["record"] is None else ExitRecord(**report["record"])
    return {int(rank): code for rank, code in report["exits"].items()}, record


def job_code(records: Sequence[ExitRecord]) -> int:
    """Returns the exit code of a job, of which the ranks of this node ended like this; the table in
    docs/recipes.md.

    Own failures of ranks here come first, then that of a rank elsewhere, which left word, then a hang, then
    the loss of a rank that left no word: to be requeued if this attempt has written a checkpoint.
    """
    good = {EXIT_DONE, EXIT_REQUEUE, EXIT_HANG}
    codes = {record.code for record in records}
    own = {record.code for record in records if not record.consequence}
    told = {record.code for record in records if record.told}
    lost = {record.code for record in records if record.consequence}
    # A crash at an unknown time may come of a hang: NCCL aborts a rank that has lost another.
    sure = {record.code for record in records if not record.consequence and record.time < math.inf}
    table = (
        (EXIT_BAD_INPUT in own, EXIT_BAD_INPUT),
        (sure - good, EXIT_FAILED),
        (EXIT_BAD_INPUT in told, EXIT_BAD_INPUT),
        (told - good, EXIT_FAILED),
        (EXIT_HANG in codes, EXIT_HANG),
        (own - good, EXIT_FAILED),
        (EXIT_REQUEUE in (lost or codes), EXIT_REQUEUE),
        (lost, EXIT_FAILED),
    )
    return next((code for holds, code in table if holds), EXIT_DONE)


def exit_message(records: Sequence[ExitRecord], world: int) -> str:
    """Returns the message for a job whose ranks ended like this: the cause, once; empty if there is none."""
    code = job_code(records)
    bad = [r for r in records if r.consequence or r.code not in (EXIT_DONE, EXIT_REQUEUE)]
    candidates = [record for record in bad if code in (record.code, EXIT_FAILED)]
    if not candidates:
        return ""
    cause = min(candidates, key=lambda record: (record.consequence, record.time, record.rank))
    if cause.for_all:
        return f"{said_of(cause)}{cause.traceback}"
    who = "torchrun" if cause.rank == TORCHRUN else f"rank {cause.rank} of {world}"
    line = cause.line or f"ended with exit code {cause.code}"
    text = f"trainer: {who} failed:\n{cause.traceback}" if cause.traceback else f"trainer: {who}: {line}\n"
    others = [str(rank) for rank in sorted({record.rank for record in bad} - {cause.rank, TORCHRUN})]
    if others:
        text += f"trainer: as a consequence failed or was stopped: rank {', '.join(others)}\n"
    return text


def said_of(record: ExitRecord) -> str:
    """Returns the line of a record for the user."""
    return f"trainer: {'error: ' * (record.code == EXIT_BAD_INPUT)}{record.line}\n"


def ending(exit_code: int) -> str:
    """Describes the exit code of a process; negative: the signal that killed it."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    if -exit_code not in list(signal.Signals):
        return f"was killed by signal {-exit_code}"
    number = signal.Signals(-exit_code)
    return f"was killed by {number.name}{_HINTS.get(number, '')}"


def crashed(folder: Path, rank: int, exit_code: int) -> ExitRecord:
    """Makes the record of a rank that wrote none; its traceback is that of faulthandler, if there is one."""
    file = folder / f"rank-{rank}.fault"
    fault = file.read_text() if file.exists() else ""
    trace = f"{ending(exit_code)}\n{fault}" if fault else ""
    # Nobody but the kernel or a person kills so, while the launcher waits: it is never another rank's doing.
    time = 0.0 if exit_code == -signal.SIGKILL else float("inf")
    return ExitRecord(rank, EXIT_FAILED, ending(exit_code), trace, time)


def hung(folder: Path, rank: int) -> ExitRecord | None:
    """Makes the record of a rank whose code holds the GIL; None without two dumps of faulthandler.

    The first may be of a job that was suspended as a whole.
    """
    try:
        where, _, stacks = (folder / f"rank-{rank}.hang").read_text(errors="replace").partition("\n")
    except OSError:
        return None
    first, *later = stacks.split(_DUMP)[1:] or [""]
    if not later:
        return None
    line = f"no progress since {where}; its code holds the GIL; if that is only slow, raise parallel.hang_s"
    return ExitRecord(rank, EXIT_HANG, line, f"{_DUMP}{first}", time.monotonic(), for_all=True)


def by_memory(record: ExitRecord, words: str) -> ExitRecord:
    """Returns the record of a rank that was killed because memory was full, with these words as its line."""
    line, trace = (text.replace(_MAYBE_MEMORY, words) for text in (record.line, record.traceback))
    return replace(record, line=line, traceback=trace)


def dead_worker(error: BaseException) -> str:
    """Returns one line about the loader worker whose death raised this.

    "" for any other error, also if a loader worker died while it was being handled.
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


TERMINATION_LOG = Path("/dev/termination-log")  # unless a pod says otherwise
_MOST = 4096  # bytes that Kubernetes keeps
_STOPPED = "stopped with a checkpoint, to be resumed"


def leave_message(code: int, text: str, environment: Mapping[str, str] = os.environ) -> None:
    """Writes how a launcher ends to its pod's termination file, if that is writable.

    Args:
        code: The exit code.
        text: The message: lines, perhaps with a traceback.
    """
    if code == EXIT_DONE or "KUBERNETES_SERVICE_HOST" not in environment or not TERMINATION_LOG.is_file():
        return
    with contextlib.suppress(OSError):
        TERMINATION_LOG.write_bytes(message_of(code, text))


def message_of(code: int, text: str) -> bytes:
    """Makes the message: the code, then the text; of a text that is too long, its first line and its end."""
    text = redact_text(text).strip().removeprefix("trainer: ") or (_STOPPED if code == EXIT_REQUEUE else "")
    message = f"exit code {code}{': ' * bool(text)}{text}\n".encode("utf-8", "replace")
    if len(message) <= _MOST:
        return message
    first, _, rest = message.partition(b"\n")
    first = first[: _MOST // 2]
    kept = first + b"\n...\n" + rest[len(first) + 5 - _MOST :]
    return kept.decode("utf-8", "ignore").encode()  # without the halves of characters
