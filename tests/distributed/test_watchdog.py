"""Promise: a rank that hangs is named, with its phase and its step, and the job ends with code 76."""

import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tests.helpers import forked, hangs, preloaded
from tests.helpers.hangs import Ending, Hang, Job, hang, is_named, recipe_of, watched_hang
from tests.helpers.refusals import named
from tests.helpers.steps import ALONE
from tests.helpers.waiting import SECONDS, until_gone
from trainer.config.training import ParallelConfig
from trainer.distributed import exchange, watchdog as watchdog_module
from trainer.distributed.watchdog import Place, Watchdog, waited_for
from trainer.errors import EXIT_FAILED, EXIT_HANG, EXIT_REQUEUE, BadInputError, LostPeerError
from trainer.launch import exit_record
from trainer.launch.worker import leave_now
from trainer.observe import phases

ROOT = Path(__file__).parents[2]
# What all its tests wait for is started once: in one process, also where tests run in several.
pytestmark = pytest.mark.xdist_group("hang")
# Of two ranks one is stopped; of four that share weights one hangs. What sets other phases apart is that a
# rank has said where it is: `test_each_phase_is_said`.
STOPPED, SHARDED = Hang(1, "stopped", 5), Hang(2, "forward", 3)

# The watch begins in the step in which the last rank hangs: a slow start is no hang.
INJECTED = """
import ctypes, os, threading, time
from trainer.distributed import watchdog
from trainer.train import loop
train_step, start, dump = loop.train_step, watchdog.Watchdog.start, watchdog.dump_unless_called_within
begun, looks = [], threading.Event()
def dump_and_look(*given):
    dump(*given)
    looks.set()
def stuck(run, batches, step):
    if step == 2:
        start(*begun.pop())
        looks.wait()
        if os.environ.get("RANK") == str(run.world.size - 1):
            run.state.optimizer.step = lambda: SLEEP(1000)
    train_step(run, batches, step)
if train_step.__name__ == "train_step":  # else this process is the fork of one that has it
    watchdog.dump_unless_called_within, loop.train_step = dump_and_look, stuck
    watchdog.Watchdog.start = lambda *given: begun.append(given)
"""


def command_line(folder: Path, ranks: int, sleep: str, hang_s: float) -> Ending:
    """A user's run in a process of its own, with a fault put in by Python's own start."""
    (folder / "sitecustomize.py").write_text(INJECTED.replace("SLEEP", sleep))
    words = f"train digits --nproc-per-node {ranks} data.micro_batch_size=32 parallel.hang_s={hang_s}"
    words += f" parallel.threads=1 model.width=4 log.to=[jsonl] --out {folder / 'run'}"
    options: dict[str, Any] = {
        "cwd": ROOT,
        "env": {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"},
        "timeout": SECONDS,
    }
    done = preloaded.run([sys.executable, "-m", "trainer", *words.split()], **options)
    return Ending(done.returncode, done.stderr, 0.0)


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ending]:
    """How the jobs of this file end: all at once, as they mostly wait."""
    preloaded.parent()  # it imports while the first jobs run
    hsdp = recipe_of(4.0, parallel={"strategy": "hsdp", "shard": 2})
    sharded = Job(4, hsdp, *watched_hang(SHARDED))
    stopped = Job(2, recipe_of(2.0), *watched_hang(STOPPED))
    with ThreadPoolExecutor() as pool:  # now that the jobs are forked
        sleeps = pool.submit(command_line, tmp_path_factory.mktemp("hang"), 2, "time.sleep", 2)
        gil = pool.submit(command_line, tmp_path_factory.mktemp("hang"), 1, "ctypes.PyDLL(None).sleep", 1)
        ended = {"sharded": sharded.end(), "stopped": stopped.end()}
        return {**ended, "sleeps": sleeps.result(), "holds the GIL": gil.result()}


def test_a_hang_is_named(endings: dict[str, Ending]) -> None:
    stopped, sharded = endings["stopped"], endings["sharded"]
    assert is_named(stopped, STOPPED), stopped
    assert re.search(r"; rank 0 waits in [a-z]+, step 5(?! waits)", stopped.text)
    assert "rank 0 is here:" in stopped.text
    # Those of its own group wait in a gathering, the other group for the sum over both.
    assert is_named(sharded, SHARDED), sharded


def test_each_phase_is_said(tmp_path: Path) -> None:
    """Where a rank would hang it has said that it is there; what is made of that is the same everywhere."""
    steps = {"forward": 4, "backward": 1, "update": 7, "evaluation": 8, "logging": 2, "checkpoint": 10}
    notes = tmp_path / "notes"

    def note() -> None:
        with notes.open("a") as file:
            file.write(f"{phases.PHASE_TIMER.phase} {phases.PHASE_TIMER.step}\n")

    def before() -> None:
        forked.replace(hangs, "sleep_forever", note)
        for phase, step in steps.items():
            hang(Hang(0, phase, step))(0)

    assert forked.attempt(tmp_path / "run", recipe_of(60.0), before=before).code == 0
    assert set(notes.read_text().splitlines()) == {f"{phase} {step}" for phase, step in steps.items()}


def watched(monkeypatch: pytest.MonkeyPatch, *happens: Callable[[], object]) -> int:
    """The watchdog over a rank that is alone in step 7, with what happens before each of its looks.

    Returns the look at which it left, or 0.
    """
    watchdog, looks = Watchdog(ALONE, ParallelConfig(hang_s=20, timeout_s=200)), list[None]()

    def wait(_: float) -> bool:
        if len(looks) == len(happens):
            return True
        looks.append(None)
        happens[len(looks) - 1]()
        return False

    phases.PHASE_TIMER.step = 7
    leaves = mock.Mock(side_effect=InterruptedError)
    monkeypatch.setattr("trainer.distributed.watchdog.leave_now", leaves)
    monkeypatch.setattr(watchdog.stopped, "wait", wait)
    try:
        watchdog.watch()
    except InterruptedError:  # it ended the job
        code, line, *_ = leaves.call_args.args
        assert code == EXIT_HANG and "no progress for 20 s: rank 0 hangs in" in line
        return len(looks)
    finally:
        phases.PHASE_TIMER.reset()
    return 0


nothing: Callable[[], object] = int


def test_a_rank_without_progress_is_left_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first look it notes where the rank is; four more are the time without progress."""
    assert watched(monkeypatch, *[nothing] * 4) == 0
    assert watched(monkeypatch, *[nothing] * 9) == 5


@pytest.mark.parametrize(
    ("phase", "progress"),
    [("forward", lambda: phases.enter_phase("forward")), ("checkpoint", phases.heartbeat)],
)
def test_slow_progress_is_no_hang(
    monkeypatch: pytest.MonkeyPatch, phase: phases.Phase, progress: Callable[[], None]
) -> None:
    """Each phase, and while a checkpoint is written each piece of it."""
    now_and_then = [*[nothing] * 3, progress] * 5
    assert watched(monkeypatch, lambda: phases.enter_phase(phase), *now_and_then) == 0
    if phase == "checkpoint":  # a writer in the background excuses nobody else
        assert watched(monkeypatch, lambda: phases.enter_phase("forward"), *now_and_then) > 0


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[Watchdog]:
    """The watchdogs of three ranks."""
    store = HashStore()
    monkeypatch.setattr(watchdog_module, "store_client", lambda *_: store)
    config = ParallelConfig(hang_s=0.02, timeout_s=200)
    return [Watchdog(replace(ALONE, rank=rank, size=3), config) for rank in range(3)]


def test_a_store_that_left_with_its_rank_is_tried_for_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    made = mock.Mock(return_value=HashStore())
    monkeypatch.setattr(exchange, "TCPStore", made)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    exchange.store_client("x", 600)
    assert made.call_args.args[4] <= timedelta(minutes=1)
    assert made.return_value.timeout == timedelta(minutes=10)  # of an answer


def test_one_rank_that_makes_progress_is_enough(ranks: list[Watchdog]) -> None:
    _, before = ranks[0].job_state(False, 0)
    assert ranks[1].job_state(False, 0) == ("runs", before)
    ranks[2].job_state(True, 0)
    assert ranks[0].job_state(False, 0) == ("runs", before + 1)


def test_a_rank_that_fails_leaves_word_for_those_who_lose_it(ranks: list[Watchdog]) -> None:
    ranks[1].leave_word(ValueError("broken"))
    ranks[2].leave_word(BadInputError("too late"))  # the first one counts
    with pytest.raises(LostPeerError) as lost:
        ranks[0].leave_word(RuntimeError("Connection closed by peer"))
    record = exit_record.record_of(0, None, lost.value)
    assert (record.code, record.told, record.consequence) == (EXIT_FAILED, True, True)
    assert named(record.line, "rank 1 ValueError: broken")
    assert ranks[0].job_state(False, 0)[0] == "failed"


@pytest.mark.parametrize(("saved", "code"), [(False, EXIT_FAILED), (True, EXIT_REQUEUE)])
def test_a_rank_that_left_no_word_is_only_lost(ranks: list[Watchdog], saved: bool, code: int) -> None:
    with pytest.raises(LostPeerError) as lost:
        ranks[0].leave_word(RuntimeError("Connection closed by peer"))
    lost.value.saved = saved
    record = exit_record.record_of(0, None, lost.value)
    assert (record.code, record.told, exit_record.job_code([record])) == (code, False, code)


def test_a_store_that_is_gone_says_nothing(ranks: list[Watchdog], monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(HashStore, "add", gone)
    assert ranks[1].job_state(True, 7) == ("runs", 7)
    monkeypatch.setattr(HashStore, "append", gone)
    monkeypatch.setattr(HashStore, "get", gone)
    places = ranks[1].places_of_all(Place(1, 5, 2, "communication"))
    line, behind = waited_for(places, 3, 4.0)  # it was in rank 0, or on its host
    assert behind == [0] and named(line, "rank 0 rank 1 communication")


def test_no_watch_where_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watchdog, "watch", int)  # with no time to wait it would end this process at once
    watchdog = Watchdog(ALONE, ParallelConfig(hang_s=0))
    watchdog.start()
    assert watchdog._thread is None


def test_the_command_line_says_who_hangs(endings: dict[str, Ending]) -> None:
    code, text, _ = endings["sleeps"]
    assert code == EXIT_HANG, text
    head, *rest = text.splitlines()
    assert named(head, "rank 1 update, step 3 rank 0")
    assert "rank 1 is here:" in rest
    assert any("sitecustomize.py" in line for line in rest)


def test_code_that_holds_the_gil(endings: dict[str, Ending]) -> None:
    """No thread of ours runs then: the launcher takes what faulthandler writes for a hang record."""
    code, text, _ = endings["holds the GIL"]
    assert code == EXIT_HANG, text
    assert named(text.splitlines()[0], "rank 0 GIL parallel.hang_s"), text
    assert "sitecustomize.py" in text


def test_a_first_dump_may_be_of_a_job_that_was_suspended(tmp_path: Path) -> None:
    file = tmp_path / "rank-0.hang"
    assert exit_record.hung(tmp_path, 0) is None
    for dumps, hung in ((0, False), (1, False), (2, True)):
        file.write_text("rank 0 on here: forward, step 3\n" + "Timeout (0:00:05)!\n  File x\n" * dumps)
        record = exit_record.hung(tmp_path, 0)
        assert (record is not None) == hung
    assert record is not None and record.code == EXIT_HANG and named(record.line, "forward, step 3 GIL")


WAITS, BEHIND = Place(0, 200, 13, "communication"), Place(0, 120, 13, "data")
DONE, SAVES = Place(0, 100, 16, "done"), Place(0, 200, 13, "checkpoint")


@pytest.mark.parametrize(
    ("places", "silent", "blamed", "names"),
    [
        ([*[WAITS] * 1000, BEHIND], 0, [1000], "rank 1000 data, step 13; 1000 communication"),
        ([*[BEHIND] * 5, WAITS, WAITS], 0, [0, 1, 2, 3, 4], "0, 1 3 data, step 13; 2"),
        ([WAITS, WAITS], 0, [0, 1], "2 communication, step 13"),
        # Stopped in a collective it may have made more phases than those that wait for it there.
        ([WAITS, BEHIND], 1, [2], "rank 2"),
        ([DONE, SAVES], 0, [1], "rank 1"),
    ],
    ids=["behind", "several behind", "nobody behind", "silent", "others done"],
)
def test_who_is_blamed(places: list[Place], silent: int, blamed: list[int], names: str) -> None:
    numbered = [place._replace(rank=number) for number, place in enumerate(places)]
    line, ranks = waited_for(numbered, len(places) + silent, 30.0)
    assert ranks == blamed and named(line, names) and len(line) < 300


def test_a_step_that_compiles_has_more_time() -> None:
    watched = Watchdog(ALONE, ParallelConfig(hang_s=30, timeout_s=200))
    watched._compiling_until = 3
    limits = {}
    for step, phase in ((3, "forward"), (3, "communication"), (4, "forward"), (16, "end")):
        phases.PHASE_TIMER.step, phases.PHASE_TIMER.phase = step, phase  # type: ignore[assignment]
        limits[step, phase] = watched.allowed_seconds()
    assert limits == {
        (3, "forward"): 300,
        (3, "communication"): 150,  # before the collective's own time is over
        (4, "forward"): 30,
        (16, "end"): 300,
    }
    phases.PHASE_TIMER.reset()
    assert Watchdog(ALONE, ParallelConfig(hang_s=300, timeout_s=200)).allowed_seconds() == 1000


def _leaves(pipe: Connection) -> None:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
    child.start()
    pipe.send(child.pid)
    leave_now(EXIT_HANG, "")


def test_a_rank_that_leaves_ends_what_it_started() -> None:
    """A loader worker that hangs would stay for ever."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_leaves, args=(theirs,))
    process.start()
    child = ours.recv()
    process.join(SECONDS)
    assert process.exitcode == EXIT_HANG
    until_gone(child)
