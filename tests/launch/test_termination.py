"""Promise: a pod's termination message says how its launcher ended, and no secret."""

import os
from pathlib import Path
from typing import Any

import pytest

from trainer.launch import exit_record, launcher
from trainer.launch.exit_record import ExitRecord, leave_message, message_of

POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What Kubernetes mounts."""
    file = tmp_path / "termination-log"
    file.touch()
    monkeypatch.setattr(exit_record, "TERMINATION_LOG", file)
    return file


def test_code_and_cause_stand_there(file: Path) -> None:
    leave_message(2, "trainer: data.path=/none: no such folder\n", POD)
    assert file.read_text() == "exit code 2: data.path=/none: no such folder\n"
    leave_message(75, "", POD)
    assert file.read_text() == "exit code 75: stopped with a checkpoint, to be resumed\n"
    leave_message(1, "", POD)
    assert file.read_text() == "exit code 1\n"


def test_nothing_is_written_by_a_run_that_is_through_nor_outside_of_a_pod(file: Path) -> None:
    leave_message(0, "", POD)
    leave_message(1, "trainer: it failed\n", {})
    assert file.read_text() == ""
    file.unlink()
    leave_message(1, "trainer: it failed\n", POD)
    assert not file.exists(), "it is Kubernetes' to make"


@pytest.mark.usefixtures("file")
def test_a_file_that_can_not_be_written_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    leave_message(1, "trainer: it failed\n", POD)


def test_it_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2hunter2")
    assert message_of(1, "trainer: AWS_SECRET_ACCESS_KEY=hunter2hunter2") == (
        b"exit code 1: AWS_SECRET_ACCESS_KEY=***\n"
    )


def test_of_a_long_traceback_the_first_line_and_the_end_are_kept() -> None:
    text = f"trainer: rank 3 of 8 failed:\n{'€' * 9000}\nValueError: the cause\n"
    message = message_of(1, text)
    assert 4090 <= len(message) <= 4096
    lines = message.decode().splitlines()
    assert (lines[0], lines[-1]) == ("exit code 1: rank 3 of 8 failed:", "ValueError: the cause")


def test_the_launcher_leaves_that_of_its_last_attempt(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["the first", "the second"])

    def run(*_: object) -> tuple[list[ExitRecord], dict[str, Any]]:
        return [ExitRecord(0, 1, next(lines))], {}

    monkeypatch.setitem(os.environ, "KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setattr(launcher.WorkerGroup, "run", run)
    asked: dict[str, Any] = {"resume": "auto"}
    assert launcher.launch("module", asked, launcher.LocalRanks(1, 1), max_restarts=1).code == 1
    assert file.read_text() == "exit code 1: rank 0 of 1: the second\n"
