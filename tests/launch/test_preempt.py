"""P4: a rank notes the signals that ask it to stop, and its loader workers don't."""

import os
import signal
from types import SimpleNamespace

import pytest

from trainer.launch import signals
from trainer.launch.signals import SignalReceiver


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
