"""P4: a rank notes the signals that ask it to stop, and its loader workers don't."""

import os
import signal
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from trainer.launch import signals
from trainer.launch.signals import SignalReceiver
from trainer.launch.worker import Worker, requested


def _ends_as(become_a_rank: bool) -> int:
    """The exit code of a child of a rank that gets SIGTERM; 0 if it noted it."""
    child = os.fork()
    if child == 0:
        with Worker() if become_a_rank else nullcontext():
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0 if requested() is signal.SIGTERM else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(("become_a_rank", "code"), [(False, -signal.SIGTERM), (True, 0)])
def test_a_child_of_a_rank_dies_of_sigterm_unless_it_becomes_one(become_a_rank: bool, code: int) -> None:
    rank = os.fork()  # so that this process keeps its own handlers
    if rank == 0:
        with Worker():
            os._exit(_ends_as(become_a_rank) % 256)
    assert os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) == code % 256


def test_the_launcher_notes_each_signal_once_and_every_ctrl_c() -> None:
    with SignalReceiver() as receiver:
        for name in ("USR1", "TERM", "USR1", "HUP", "INT", "TERM"):
            assert not receiver.interrupted_twice
            os.kill(os.getpid(), signal.Signals[f"SIG{name}"])
        assert receiver.received == [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT]
        os.kill(os.getpid(), signal.SIGINT)
        assert receiver.interrupted_twice


def test_a_second_ctrl_c_ends_a_rank_and_one_that_came_by_two_ways_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moments = iter([0.0, 1.0, 1.01])
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: next(moments)))

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    flag = signals.StopFlag()
    flag.note(signal.SIGINT)
    flag.note(signal.SIGINT)
    assert flag.requested is signal.SIGINT
    with pytest.raises(SystemExit, match="130"):
        flag.note(signal.SIGINT)
