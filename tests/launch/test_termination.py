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


def test_code_and_cause_stand_there(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of a run that is through, nor outside of a pod, nor where Kubernetes made no file."""
    leave_message(0, "", POD)
    leave_message(1, "trainer: it failed\n", {})
    assert file.read_text() == ""
    for code, text, said in (
        (2, "trainer: data.path=/none: no such folder\n", "exit code 2: data.path=/none: no such folder\n"),
        (75, "", "exit code 75: stopped with a checkpoint, to be resumed\n"),
        (1, "", "exit code 1\n"),
    ):
        leave_message(code, text, POD)
        assert file.read_text() == said
    file.unlink()
    leave_message(1, "trainer: it failed\n", POD)
    assert not file.exists()
    file.touch()

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    leave_message(1, "trainer: it failed\n", POD)  # ends nothing


def test_it_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2hunter2")
    said = message_of(1, "trainer: AWS_SECRET_ACCESS_KEY=hunter2hunter2")
    assert said == b"exit code 1: AWS_SECRET_ACCESS_KEY=***\n"


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
