"""Signals that ask for a stop. Only this module sets handlers (for Ctrl-C `cli.main` and `worker`, too).

Who takes which:

| who | SIGTERM, SIGUSR1 | SIGINT (Ctrl-C) | SIGHUP |
|---|---|---|---|
| a command, as `cli.main` starts it | the system's | ends it, no traceback | the system's |
| `train`, no ranks yet: `end_on_signal` | ends it: 75 if it can resume, else 1 | as above | as above |
| a launcher: `SignalReceiver` | sent on to each rank, once | each sent on; the second kills | as SIGTERM |
| what the launcher starts, until it can: `blocked` | waits | waits | waits |
| a rank that prepares: `Worker.prepares` | ends it: 75 if it can resume, else 1 | the same | the same |
| a rank that trains: `StopFlag` | asks for a stop | the same; the second ends it | asks for a stop |
| `fit`: `worker.interrupt_noted` | the caller's | asks for a stop; the second: the caller's | the caller's |
| a rank's forks: `leave_to_rank` | SIGTERM ends it | ignored | ignored |
| a rank whose `Worker` is closed | waits: its exit code is decided | waits | waits |
| `data`, `export`: `unwound` | SIGTERM is an exception | an exception | an exception |

SIGINT and SIGHUP that were ignored stay so: by nohup, or a script's `&`. A launcher's processes have a
session of their own, so that a terminal's Ctrl-C reaches the launcher alone; torchrun never sees a signal.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext

from trainer.errors import EXIT_FAILED, EXIT_REQUEUE
from trainer.observe.console import as_line

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

# Slurm signals every process of a step: a rank gets the signal from Slurm and again from the launcher. What
# arrives this soon after the first SIGINT is the same Ctrl-C, not a second one.
_SAME_INTERRUPT_SECONDS = 1.0


class Stopped(Exception):  # noqa: N818  (the outcome of a request, not an error)
    """A signal asked this run to stop and there is nothing to resume from: one line, exit code 1.

    Attributes:
        signal: The signal that asked.
    """

    def __init__(self, number: signal.Signals, why: str = "there is no checkpoint to resume from") -> None:
        """Says which signal stopped the run and why it can't be requeued."""
        super().__init__(f"stopped by {number.name}: {why}")
        self.signal = number


@contextmanager
def taken(
    act: Callable[[signal.Signals], object], numbers: Iterable[signal.Signals] = SIGNALS
) -> Iterator[None]:
    """Context manager that calls `act` for these signals, in the main thread, then restores the handlers."""
    left = [n for n in (signal.SIGHUP, signal.SIGINT) if signal.getsignal(n) is signal.SIG_IGN]
    before = {
        number: signal.signal(number, lambda got, _: act(signal.Signals(got)))
        for number in numbers
        if number not in left
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def end_on_signal(resumable: Callable[[], bool]) -> None:
    """Context manager for the time before a launcher takes the signals: one ends this process, as no work can
    be lost.

    As a container's first process it needs a handler for that; and a job that waits for its turn between two
    preemptions must not lose its place because the second came while Python was importing.

    Args:
        resumable: Returns whether there is a checkpoint, for the exit code; must import nothing.
    """

    def end(number: int, _: object) -> None:
        requeue = resumable()
        line = f"trainer: {before_it_began(signal.Signals(number), requeue)}"
        os.write(2, f"{as_line(line, 'warning')}\n".encode())
        os._exit(EXIT_REQUEUE if requeue else EXIT_FAILED)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, end)


def before_it_began(number: signal.Signals, requeue: bool) -> str:
    """Returns a line for a run that a signal ends before its first step; `requeue`: it has a checkpoint."""
    left = "the same command resumes from its checkpoint" if requeue else "there is no checkpoint yet"
    return f"stopped by {number.name} before it began; {left}"


class SignalReceiver:
    """Signals received by the launcher while it is open, in order: each once, except Ctrl-C.

    Attributes:
        received: The signals; SIGHUP counts as SIGTERM.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self.received: list[signal.Signals] = []
        self._taken = taken(self._note)

    def __enter__(self) -> "SignalReceiver":
        """Takes the signals."""
        self._taken.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """Gives the signals back."""
        self._taken.__exit__(None, None, None)

    @property
    def interrupted_twice(self) -> bool:
        """Returns True if the user pressed Ctrl-C twice."""
        return self.received.count(signal.SIGINT) > 1

    def _note(self, number: signal.Signals) -> None:
        name = signal.SIGTERM if number is signal.SIGHUP else number
        if name is signal.SIGINT or name not in self.received:
            self.received.append(name)


@contextmanager
def blocked() -> Iterator[None]:
    """Context manager that blocks the signals for processes started in it, until they call `unblock`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, set(before) - set(SIGNALS))


def block() -> None:
    """Blocks signals from now on; they stay pending."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def unblock() -> None:
    """Delivers pending signals."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


class StopFlag:
    """Signal that a rank received: a flag that its loop reads between two steps.

    Attributes:
        requested: The first signal that asked for a stop, or None.
    """

    def __init__(self) -> None:
        """Starts unset."""
        self.requested: signal.Signals | None = None
        self._interrupted_at: float | None = None

    def note(self, number: signal.Signals) -> None:
        """Remembers the first signal; a second Ctrl-C ends the process at once."""
        if number is signal.SIGINT:
            now = time.monotonic()
            if self._interrupted_at is None:
                self._interrupted_at = now
            elif now - self._interrupted_at > _SAME_INTERRUPT_SECONDS:
                os._exit(128 + number)
        if self.requested is None:
            self.requested = number


def leave_to_rank() -> None:
    """Gives a rank's fork (a loader worker) the default SIGTERM, which ends it: nothing there reads the flag.

    Other signals are ignored: the rank acts on them, and a loader worker that dies fails its rank.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL if number is signal.SIGTERM else signal.SIG_IGN)


@contextmanager
def unwound() -> Iterator[None]:
    """Context manager in which a signal to end raises an exception, so that files and processes are cleaned
    up.

    The exit code is a shell's, 128 and the signal's number. Outside of the main thread nothing changes.
    """
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def end(number: signal.Signals) -> None:
        for other in numbers:  # a second one mustn't cut off the cleaning up
            signal.signal(other, signal.SIG_IGN)
        os.write(2, f"trainer: stopped by {number.name}\n".encode())
        raise SystemExit(128 + number)

    in_main = threading.current_thread() is threading.main_thread()
    with taken(end, numbers) if in_main else nullcontext():
        yield
