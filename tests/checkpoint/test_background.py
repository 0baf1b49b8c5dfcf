"""Promise: training continues while a checkpoint is written; a failure is reported, and older ones stay."""

import os
import shutil
import threading
from collections.abc import Callable
from errno import ENOENT, ENOSPC
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.faulty_disk import Disk
from tests.helpers.marked import hidden, mark_of, marked
from tests.helpers.refusals import named
from tests.helpers.waiting import SECONDS
from trainer.checkpoint import store
from trainer.checkpoint.background import BackgroundWriter, stage
from trainer.checkpoint.store import listing

Gate = tuple[threading.Event, threading.Event]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Set when a write has begun; and what it waits for then."""
    begun, may = threading.Event(), threading.Event()
    write_files = store.__dict__["write_files"]

    def gated(*arguments: Any) -> None:
        begun.set()
        assert may.wait(SECONDS)
        write_files(*arguments)

    monkeypatch.setattr(store, "write_files", gated)
    return begun, may


def test_training_goes_on_while_it_is_written(tmp_path: Path, gate: Gate) -> None:
    begun, may = gate
    problems: list[str] = []
    writer = BackgroundWriter(tmp_path, keep_last=2, on_problem=problems.append)

    def submit(step: int) -> None:
        state, tensors = {"mark": step}, marked(step)
        writer.submit(step, stage(tensors), state, best=0)
        state["mark"] = -1
        for group in tensors.values():
            for tensor in group.values():
                tensor.fill_(-1)

    submit(0)  # comes back though the write can't end
    assert begun.wait(SECONDS) and not listing(tmp_path)
    second = threading.Thread(target=submit, args=(1,))
    second.start()
    second.join(0.05)
    assert second.is_alive(), "one write at a time"
    assert sum(thread.name == "checkpoint" for thread in threading.enumerate()) == 1
    may.set()
    second.join(SECONDS)
    for step in (2, 3):
        submit(step)
    assert writer.finish() == 3 and writer.finish() == 3
    assert [entry.step for entry in listing(tmp_path)] == [3, 2, 0]
    assert mark_of(tmp_path) == 3 and not problems


def test_a_failed_write_is_told_and_the_next_tries_again(tmp_path: Path, disk: Callable[..., Disk]) -> None:
    run, problems = tmp_path / "run", list[str]()
    run.mkdir()
    folder = run / "checkpoints"
    writer = BackgroundWriter(folder, keep_last=1, on_problem=problems.append)

    def write(step: int) -> int | None:
        writer.submit(step, marked(step), {"mark": step})
        return writer.finish()

    disk(8, ENOSPC)
    assert write(1) is None
    assert len(problems) == 1 and named(problems[0], "1", os.strerror(ENOSPC))
    assert not hidden(folder)
    disk()
    assert write(2) == 2
    shutil.rmtree(run)
    assert write(3) == 2
    assert named(problems[1], "3", os.strerror(ENOENT))
    run.mkdir()
    assert write(4) == 4 and mark_of(folder) == 4 and len(problems) == 2


def test_a_wrong_state_is_the_caller_s_mistake(tmp_path: Path) -> None:
    writer = BackgroundWriter(tmp_path, keep_last=1, on_problem=pytest.fail)
    with pytest.raises(ValueError):
        writer.submit(1, marked(1), {"loss": float("inf")})


def test_an_abandoned_write_leaves_nothing(tmp_path: Path, gate: Gate) -> None:
    begun, may = gate
    writer = BackgroundWriter(tmp_path, keep_last=1, on_problem=pytest.fail)
    writer.submit(1, marked(1), {"mark": 1})
    assert begun.wait(SECONDS)
    writer.abandon()  # doesn't wait: the write can't end before the next line
    may.set()
    assert writer.finish() is None
    assert not list(tmp_path.iterdir())
