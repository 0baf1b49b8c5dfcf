"""Signals that ask for a stop: a flag that a rank's loop reads between two steps; a list in the launcher."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from trainer.errors import EXIT_FAILED, EXIT_REQUEUE

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


class _State:
    """What arrived so far; one per process."""

    installed = False
    requested: signal.Signals | None = None
    interrupted_at: float | None = None


def requested() -> signal.Signals | None:
    """The first signal that asked this process to stop, or None."""
    return _State.requested


def install() -> None:
    """Installs the handlers, in the main thread; calling it again changes nothing.

    SIGHUP stays ignored where it is (nohup).
    """
    if _State.installed:
        return
    _State.installed = True
    for number in SIGNALS:
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _note)
    os.register_at_fork(after_in_child=_forked)
    # The launcher starts ranks with these signals blocked, so that none kills them before this line.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _note(number: int, _frame: FrameType | None) -> None:
    """Remembers the first signal; a second Ctrl-C ends the process at once."""
    if number == signal.SIGINT:
        now = time.monotonic()
        if _State.interrupted_at is None:
            _State.interrupted_at = now
        elif now - _State.interrupted_at > _SAME_INTERRUPT_SECONDS:
            os._exit(128 + number)
    if _State.requested is None:
        _State.requested = signal.Signals(number)


def _forked() -> None:
    """Gives a forked child (a loader worker) a SIGTERM that ends it: there the flag has no reader.

    The other signals are the rank's to act on: ignored here, because a worker that dies fails its rank. A
    child that becomes a rank itself installs the handlers anew.
    """
    _State.installed = False
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL if number is signal.SIGTERM else signal.SIG_IGN)


def end_on_signal(resumable: Callable[[], bool]) -> None:
    """Until the launcher takes the signals, one ends this process: nothing has begun that could be lost.

    As a container's first process it needs a handler for that; and a job that waits for its turn between two
    preemptions must not lose its place because the second came while Python was importing.

    Args:
        resumable: Whether there is a checkpoint; then the exit code asks to be requeued. Imports nothing.
    """

    def end(number: int, _frame: FrameType | None) -> None:
        requeue = resumable()
        left = "the same command goes on from its checkpoint" if requeue else "there is no checkpoint yet"
        os.write(2, f"trainer: stopped by {signal.Signals(number).name} before it began; {left}\n".encode())
        os._exit(EXIT_REQUEUE if requeue else EXIT_FAILED)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, end)


@contextmanager
def unwound() -> Iterator[None]:
    """Meanwhile a signal to end is an exception: unfinished files and processes go as after an error.

    The exit code is a shell's, 128 and the signal's number. Outside of the main thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [
        n for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN
    ]

    def end(number: int, _frame: FrameType | None) -> None:
        for other in numbers:  # a second one mustn't cut off the cleaning up
            signal.signal(other, signal.SIG_IGN)
        os.write(2, f"trainer: stopped by {signal.Signals(number).name}\n".encode())
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def blocked() -> Iterator[None]:
    """Blocks the signals for the processes that are started meanwhile, until they call `install`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, set(before) - set(SIGNALS))


class Inbox:
    """The signals that the launcher was sent while it is open, in order: each once, but every Ctrl-C.

    Attributes:
        received: The signals; SIGHUP counts as SIGTERM.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self.received: list[signal.Signals] = []

    def __enter__(self) -> "Inbox":
        """Takes the signals, but those that nohup or a script's `&` had ignored."""
        ignored = [n for n in (signal.SIGHUP, signal.SIGINT) if signal.getsignal(n) is signal.SIG_IGN]
        self._before = {
            number: signal.signal(number, self._note) for number in SIGNALS if number not in ignored
        }
        return self

    def __exit__(self, *_: object) -> None:
        """Gives the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @property
    def interrupted_twice(self) -> bool:
        """Whether the user does not want to wait."""
        return self.received.count(signal.SIGINT) > 1

    def _note(self, number: int, _frame: FrameType | None) -> None:
        name = signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number)
        if name is signal.SIGINT or name not in self.received:
            self.received.append(name)
