"""What the ends of ranks mean for their job: its exit code, its cause, and a line for people."""

import queue
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.refusals import named
from trainer.launch import exit_record
from trainer.launch.exit_record import ExitRecord, by_memory, exit_message, record_of

DONE, REQUEUE, HANG = ExitRecord(0, 0), ExitRecord(1, 75), ExitRecord(3, 76)
BAD = ExitRecord(2, 2, "no such recipe", for_all=True)
RAISED = ExitRecord(4, 1, "ValueError: broken", "Traceback\nValueError: broken\n", time=2.0)
LOST = ExitRecord(0, 1, "lost", consequence=True)
SAVED, TOLD = replace(LOST, code=75), replace(LOST, told=True)
KILLED = ExitRecord(5, 1, "was killed by SIGKILL")


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ([DONE, DONE], 0),
        ([DONE, REQUEUE], 75),
        ([REQUEUE, RAISED], 1),
        ([RAISED, HANG, BAD, REQUEUE], 2),
        ([HANG, REQUEUE], 76),
        ([SAVED, LOST], 75),  # the second was killed before it could look
        ([SAVED, RAISED], 1),  # a failure of its own would come again
        ([SAVED, TOLD], 1),
        ([SAVED, TOLD, replace(TOLD, code=2)], 2),
        ([SAVED, HANG], 76),
    ],
)
def test_code(outcomes: list[ExitRecord], code: int) -> None:
    assert exit_record.job_code(outcomes) == code


def test_the_cause_is_the_earliest_failure_that_is_no_consequence() -> None:
    lost = replace(RAISED, rank=0, traceback="closed by peer\n", time=1.0, consequence=True)
    assert exit_message([lost, RAISED, KILLED], 6).startswith("trainer: rank 4 of 6 failed:\nTraceback\n")
    cause, consequence = exit_message([lost, KILLED, DONE], 6).splitlines()
    assert named(cause, "rank 5 of 6 SIGKILL") and named(consequence, "rank 0")
    later = replace(RAISED, rank=0, time=2.1)
    assert exit_message([later, RAISED], 6).startswith("trainer: rank 4 of 6 failed:\n")
    assert exit_message([lost], 6).startswith("trainer: rank 0 of 6 failed:\n")


@pytest.mark.parametrize(
    "text", ["Connection closed by peer [127.0.0.1]:4711", "failed to recv, got 0 bytes"]
)
def test_what_gloo_says_of_a_rank_that_left_is_a_consequence(text: str) -> None:
    assert record_of(0, None, RuntimeError(text)).consequence
    assert not record_of(0, None, RuntimeError("broken")).consequence
    # Of a connection of the user's own.
    assert not record_of(0, None, ConnectionResetError(text)).consequence


def test_a_stop_that_was_asked_for_is_one_line() -> None:
    stopped = ExitRecord(1, 1, "stopped by SIGTERM: no checkpoint", time=1.0, for_all=True)
    both = [replace(stopped, rank=0, time=1.1), stopped]
    assert exit_message([RAISED, *both], 5) == f"trainer: {stopped.line}\n"


def test_what_needs_no_explanation_gets_none() -> None:
    assert exit_message([DONE, REQUEUE], 2) == ""
    assert named(exit_message([BAD, RAISED, KILLED], 6), BAD.line)
    assert exit_message([replace(BAD, rank=0), BAD], 4).count("\n") == 1, "of all ranks together"


def _raised(*messages: str) -> BaseException:
    """The last of some errors, each raised while the one before it was handled; "" is an empty queue."""
    error: BaseException | None = None
    for message in messages:
        before, error = error, RuntimeError(message) if message else queue.Empty()
        error.__context__ = before
    assert error is not None
    return error


KILLED_WORKER = "DataLoader worker (pid 12) is killed by signal: Killed. "
TERMINATED = "DataLoader worker (pid 12) is killed by signal: Terminated. "
SEVERAL = "DataLoader worker (pid(s) 12, 13) exited unexpectedly"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (_raised("", KILLED_WORKER, SEVERAL, TERMINATED), "12 SIGKILL dmesg"),
        (_raised(f"InternalTorchDynamoError: RuntimeError: {TERMINATED}\n\nfrom user code"), "12 SIGTERM"),
        (_raised("DataLoader worker (pid 12) exited unexpectedly with exit code 3. Details"), "12 3"),
        (_raised("", SEVERAL), "12 13"),
        (_raised("DataLoader worker (pid 12) is killed by signal: Bus error. It is"), "12 SIGBUS shm"),
        (_raised("the loss is a list", TERMINATED), ""),  # the first error is the cause
    ],
)
def test_a_dead_loader_worker_is_one_line(error: BaseException, told: str) -> None:
    said = exit_record.dead_worker(error)
    assert named(said, told) and bool(said) == bool(told)


def test_a_rank_killed_for_memory_is_the_cause(tmp_path: Path) -> None:
    """Its peer fails first, as far as clocks know: the kernel doesn't say when it killed."""
    killed = by_memory(exit_record.crashed(tmp_path, 0, -signal.SIGKILL), ": out of memory (all full)")
    reset = ExitRecord(1, 1, "reset", "RuntimeError: recv: Success\n", time=5.0)
    cause, consequence = exit_message([reset, killed], 2).splitlines()
    assert named(cause, "rank 0 of 2 SIGKILL memory") and named(consequence, "rank 1")
    assert by_memory(reset, "x") == reset
