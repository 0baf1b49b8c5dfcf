"""The launcher restores what torchrun hides, and nothing is left behind.

Each check starts real processes, of which torchrun needs seconds to import torch: they run several at a time.
"""

import json
import os
import pty
import queue
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from trainer.rank import (
    TORCHRUN,
    Outcome,
    by_memory,
    crashed,
    dead_worker,
    ending,
    explain,
    is_rank,
    job_code,
)

ROOT = Path(__file__).parents[2]
# What all its tests wait for is started once: in one process, also where tests run in several.
pytestmark = pytest.mark.xdist_group("launch")
WORKER = "tests.helpers.launch_worker"
START = (
    "import json, os, sys; from trainer.launch import launch\n"
    "if os.isatty(0): os.close(os.open(os.ttyname(0), os.O_RDWR))  # makes it the controlling terminal\n"
    "sys.exit(launch(sys.argv[2:], **json.loads(sys.argv[1])))"
)


def _until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def _exists(pid: int) -> bool:
    with suppress(ProcessLookupError, FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _until_gone(*pids: int) -> None:
    _until(lambda: not any(map(_exists, pids)), 5.0)


@dataclass
class Run:
    """A launcher under test, its ranks' folder, and the folder for its temporary files."""

    folder: Path
    temporary: Path
    process: "subprocess.Popen[str]"

    def __post_init__(self) -> None:
        STARTED.append(self.process)

    def ready(self, processes: int = 2) -> list[int]:
        """The pids of the ranks, once each can take signals."""
        files = [self.folder / f"ready-{rank}" for rank in range(processes)]
        _until(lambda: all(file.exists() and file.read_text() for file in files))
        return [int(file.read_text()) for file in files]

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def signals(self, rank: int) -> list[str]:
        return (self.folder / f"signals-{rank}").read_text().split()

    def starts(self, rank: int = 0) -> int:
        return len((self.folder / f"starts-{rank}").read_text().split())

    def end(self, seconds: float = 60.0) -> tuple[int, str]:
        """The exit code and what the user read; nothing may be left of the job."""
        try:
            out, err = self.process.communicate(timeout=seconds)
        finally:
            self.process.kill()
        assert list(self.temporary.iterdir()) == []
        _until_gone(*(int(file.read_text()) for file in self.folder.glob("ready-*")))
        return self.process.returncode, (out or "") + (err or "")


def _start(tmp: Path, *what: str, environment: dict[str, str] | None = None, **options: Any) -> Run:
    """Starts `launch` in a process of its own; two ranks unless `options` says otherwise."""
    folder, temporary = tmp / "ranks", tmp / "temporary"
    folder.mkdir(exist_ok=True)
    temporary.mkdir()
    asked = json.dumps({"processes": 2, "threads": 1, "module": WORKER, **options})
    process = subprocess.Popen(
        [sys.executable, "-c", START, asked, str(folder), *what],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary), **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return Run(folder, temporary, process)


STARTED: list["subprocess.Popen[str]"] = []
CHECKS: dict[str, Callable[[Path], None]] = {}


def _check(function: Callable[[Path], None]) -> Callable[[Path], None]:
    CHECKS[function.__name__] = function
    return function


@pytest.fixture(scope="module")
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, "Future[None]"]]:
    """The checks that this session selected, several at a time: they mostly wait."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    chosen = [name for item in items if (name := item.name.removeprefix("test_launcher[")[:-1]) in CHECKS]
    with ThreadPoolExecutor(max_workers=4) as pool:
        yield {name: pool.submit(CHECKS[name], tmp_path_factory.mktemp("launch")) for name in chosen}
    for process in STARTED:  # where a check failed
        process.kill()


# --- torchrun: these take the longest, so they start first ---


@_check
def a_rank_that_raises_ends_the_others_in_a_collective(tmp: Path) -> None:
    run = _start(tmp, "0=collective", "1=fail-in-collective")
    _until((tmp / "ranks" / "raised").exists)
    since = time.monotonic()
    code, text = run.end()
    assert time.monotonic() - since < 10
    assert code == 1
    lines = text.splitlines()
    start = lines.index("trainer: rank 1 of 2 failed:")
    assert lines[start + 1] == "Traceback (most recent call last):"
    assert text.count("Traceback (most recent call last)") == 1
    assert lines[-2:] == [
        "ValueError: rank 1 is broken",
        "trainer: as a consequence failed or was stopped: rank 0",
    ]
    assert "elastic" not in text


@_check
def a_rank_that_raises_ends_the_others_in_their_sleep(tmp: Path) -> None:
    run = _start(tmp, "0=sleep", "1=raise")
    _until((tmp / "ranks" / "raised").exists)
    since = time.monotonic()
    code, text = run.end()
    assert time.monotonic() - since < 10
    assert code == 1
    assert text.startswith("trainer: rank 1 of 2 failed:\nTraceback (most recent call last):\n")
    assert text.endswith("trainer: as a consequence failed or was stopped: rank 0\n")


@_check
def signals_reach_each_rank_once(tmp: Path) -> None:
    run = _start(tmp, "obey-three")
    os.kill(_parent(run.ready()[0]), signal.SIGUSR1)  # torchrun gets it too: Slurm signals every process
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
        run.send(number)
        time.sleep(0.2)
    assert run.end() == (75, "")
    assert sorted(run.signals(0)) == sorted(run.signals(1)) == ["SIGINT", "SIGTERM", "SIGUSR1"]


@_check
def a_signal_before_the_ranks_are_there_waits_for_them(tmp: Path) -> None:
    run = _start(tmp, "obey")
    _until(lambda: list(run.temporary.iterdir()))
    run.send(signal.SIGTERM)
    assert not list(run.folder.iterdir())
    assert run.end() == (75, "")
    assert run.signals(0) == run.signals(1) == ["SIGTERM"]


def _press_ctrl_c_twice(tmp: Path, processes: int) -> None:
    master, slave = pty.openpty()
    folder, temporary = tmp / "ranks", tmp / "temporary"
    folder.mkdir()
    temporary.mkdir()
    asked = json.dumps({"processes": processes, "threads": 1, "module": WORKER})
    process = subprocess.Popen(
        [sys.executable, "-c", START, asked, str(folder), "sleep"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=slave,
        stdout=slave,
        stderr=slave,
        text=True,
        start_new_session=True,
    )
    os.close(slave)
    run = Run(folder, temporary, process)
    run.ready(processes)
    os.write(master, b"\x03")
    time.sleep(1.2)
    assert [run.signals(rank) for rank in range(processes)] == [["SIGINT"]] * processes
    assert process.poll() is None
    since = time.monotonic()
    os.write(master, b"\x03")
    code, _ = run.end()
    assert time.monotonic() - since < 5
    assert code == 1
    text = os.read(master, 10000).decode()
    assert text.replace("^C", "").split("\r\n") == ["trainer: stopped by a second SIGINT", ""]


@_check
def ctrl_c_reaches_each_rank_once_and_a_second_one_ends_it_at_once(tmp: Path) -> None:
    _press_ctrl_c_twice(tmp, 2)


@_check
def kill_9_of_the_launcher_leaves_no_orphan(tmp: Path) -> None:
    run = _start(tmp, "sleep")
    pids = run.ready()
    pids += [_parent(pid) for pid in pids]
    assert len(set(pids)) == 3  # two ranks and the torchrun that started both
    run.process.kill()
    run.process.wait()
    _until_gone(*pids)


@_check
def kill_9_of_a_rank_is_named(tmp: Path) -> None:
    run = _start(tmp, "sleep")
    os.kill(run.ready()[1], signal.SIGKILL)
    since = time.monotonic()
    code, text = run.end()
    assert time.monotonic() - since < 10
    assert code == 1
    assert text.splitlines() == [
        "trainer: rank 1 of 2: was killed by SIGKILL (out of memory? see dmesg)",
        "trainer: as a consequence failed or was stopped: rank 0",
    ]


@_check
def a_rank_that_ignores_the_signal_is_killed_after_the_grace(tmp: Path) -> None:
    run = _start(tmp, "0=obey", "1=sleep", grace_seconds=2.0)
    run.ready()
    run.send(signal.SIGTERM)
    code, text = run.end(15)
    assert code == 1
    assert text == "trainer: rank 1 of 2: did not end within 2 s of SIGTERM and was killed\n"


@_check
def ranks_that_never_register_are_killed_after_the_grace(tmp: Path) -> None:
    run = _start(tmp, "never-register", grace_seconds=0.5)
    run.ready()
    run.send(signal.SIGUSR1)
    code, text = run.end(15)
    assert code == 1
    assert text.startswith("trainer: rank 0 of 2: did not end within 0.5 s of SIGUSR1 and was killed\n")


@_check
def bad_input_in_every_rank_is_one_line(tmp: Path) -> None:
    assert _start(tmp, "bad", max_restarts=1).end() == (2, "trainer: lr: -1 is negative; make it positive\n")
    assert len((tmp / "ranks" / "starts-0").read_text().split()) == 1


@_check
def arguments_and_variables_arrive_and_one_rank_can_ask_for_a_requeue(tmp: Path) -> None:
    words = ["$$HOME", "${local_rank}", "--signal", "--r", "--", "a b", ""]
    foreign = {
        "PET_MAX_RESTARTS": "3",
        "PET_NO_PYTHON": "1",
        "PET_NPROC_PER_NODE": "7",
        "OMP_NUM_THREADS": "9",
    }
    run = _start(tmp, "tell", *words, environment=foreign, threads=3)
    assert run.end() == (75, "")
    assert not (run.folder / "signals-0").exists()  # the rank that was not ready yet ended in peace
    told = json.loads((run.folder / "told-1").read_text())
    assert told == {
        "arguments": words,
        "OMP_NUM_THREADS": "3",
        "MKL_NUM_THREADS": "3",
        "WORLD_SIZE": "2",
        "COLOUR": None,
    }


@_check
def ranks_import_what_the_launcher_imported(tmp: Path) -> None:
    """Not what lies in the working folder, where a container often has a checkout of this project."""
    decoy = tmp / "here" / "trainer"
    decoy.mkdir(parents=True)
    (decoy / "__init__.py").write_text("raise SystemExit('the wrong trainer')")
    start = tmp / "start.py"  # so that the working folder isn't on the launcher's own path
    start.write_text(f"import json, sys; print(json.dumps(sys.path))\n{START}")
    for processes in (1, 2):
        folder = tmp / str(processes)
        folder.mkdir()
        asked = json.dumps({"processes": processes, "threads": 1, "module": WORKER})
        ended = subprocess.run(
            [sys.executable, start, asked, folder, "tell-paths"],
            cwd=decoy.parent,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (ended.returncode, ended.stderr) == (0, "")
        wanted = [str(ROOT / "trainer/__init__.py"), json.loads(ended.stdout), [], WORKER]
        told = [json.loads((folder / f"paths-{rank}").read_text()) for rank in range(processes)]
        assert told == [wanted] * processes


@_check
def plain_torchrun_works_too(tmp: Path) -> None:
    command = "-m torch.distributed.run --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 -m"
    ended = subprocess.run(
        [sys.executable, *command.split(), WORKER, str(tmp), "0=obey", "1=raise"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert "\nValueError: rank 1 is broken\n" in ended.stderr
    assert re.search(r"exitcode\s*: 1\b", ended.stderr)


# --- one rank: no torchrun ---


@_check
def one_rank_keeps_its_code(tmp: Path) -> None:
    for what, code, text in (
        ("done", 0, ""),
        ("bad", 2, "trainer: lr: -1 is negative; make it positive\n"),
        ("requeue", 75, ""),
        ("hang", 76, "trainer: rank 0 of 1: no step for 600 s\n"),
    ):
        (tmp / what).mkdir()
        run = _start(tmp / what, what, processes=1, max_restarts=1)
        assert run.end(15) == (code, text)
        assert run.starts() == 1


@_check
def one_rank_that_raises_shows_its_traceback(tmp: Path) -> None:
    run = _start(tmp, "once", processes=1, max_restarts=1, environment={"COLOUR": "blue"})
    code, text = run.end(15)
    assert code == 0
    assert text.startswith("trainer: rank 0 of 1 failed:\nTraceback (most recent call last):\n")
    assert "rank.py" not in text
    assert text.endswith("ValueError: rank 0 is broken\ntrainer: starting again (1 of 1)\n")


@_check
def a_stop_without_checkpoint_is_one_line(tmp: Path) -> None:
    run = _start(tmp, "stop", processes=1, max_restarts=1)
    run.ready(1)
    run.send(signal.SIGHUP)  # the terminal closed
    assert run.end() == (1, "trainer: stopped by SIGTERM: there is no checkpoint to resume from\n")
    assert run.starts() == 1


@_check
def a_single_rank_that_ignores_the_signal_is_killed_after_the_grace(tmp: Path) -> None:
    run = _start(tmp, "sleep", processes=1, grace_seconds=0.5)
    run.ready(1)
    run.send(signal.SIGTERM)
    assert run.end(15) == (1, "trainer: rank 0 of 1: did not end within 0.5 s of SIGTERM and was killed\n")


@_check
def ctrl_c_reaches_a_single_rank_once(tmp: Path) -> None:
    _press_ctrl_c_twice(tmp, 1)


@_check
def an_interrupt_by_two_ways_is_one(tmp: Path) -> None:
    run = _start(tmp, "obey", processes=1)
    os.kill(run.ready(1)[0], signal.SIGINT)  # by Slurm, and by the launcher
    run.send(signal.SIGINT)
    assert run.end(15) == (75, "")
    assert run.signals(0) == ["SIGINT", "SIGINT"]


@_check
def a_fault_in_native_code_shows_where(tmp: Path) -> None:
    code, text = _start(tmp, "crash", processes=1).end(15)
    assert code == 1
    assert text.startswith("trainer: rank 0 of 1 failed:\nwas killed by SIGSEGV")
    assert "worker.py" in text


@_check
def kill_9_of_the_launcher_of_one_rank_leaves_no_orphan(tmp: Path) -> None:
    run = _start(tmp, "sleep", processes=1)
    (pid,) = run.ready(1)
    run.process.kill()
    run.process.wait()
    _until_gone(pid)


@_check
def a_rank_that_hangs_in_its_exit_is_done(tmp: Path) -> None:
    assert _start(tmp, "hang-in-exit", processes=1, grace_seconds=1.0).end(15) == (0, "")


@_check
def what_a_rank_leaves_behind_is_ended(tmp: Path) -> None:
    assert _start(tmp, "leave-a-child", processes=1).end(15) == (0, "")
    pid = int((tmp / "ranks" / "child").read_text())
    _until_gone(pid)


@_check
def a_forked_worker_can_be_terminated(tmp: Path) -> None:
    assert _start(tmp, "terminate-a-fork", processes=1).end(15) == (0, "")


@_check
def a_rank_without_launcher_keeps_its_code_and_prints(tmp: Path) -> None:
    environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    for what, code, text in (
        ("requeue", 75, ""),
        ("bad", 2, "trainer: lr: -1 is negative; make it positive\n"),
        ("raise", 1, "ValueError: rank 0 is broken\n"),
    ):
        command = [sys.executable, "-m", WORKER, str(tmp), what]
        ended = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert ended.returncode == code
        assert ended.stderr.endswith(text)
        assert ended.stderr.startswith("Traceback") == (what == "raise")


SLOW = {"two_nodes_are_one_job"}


@pytest.mark.parametrize(
    "check", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CHECKS]
)
def test_launcher(check: str, running: dict[str, "Future[None]"]) -> None:
    running[check].result()


# --- what the outcomes mean ---


DONE, REQUEUE, BAD, HANG = (
    Outcome(0, 0),
    Outcome(1, 75),
    Outcome(2, 2, "no such recipe", for_all=True),
    Outcome(3, 76),
)
RAISED = Outcome(4, 1, "ValueError: broken", "Traceback\nValueError: broken\n", time=2.0)
KILLED = Outcome(5, 1, "was killed by SIGKILL")


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ([DONE, DONE], 0),
        ([DONE, REQUEUE], 75),
        ([REQUEUE, RAISED], 1),
        ([REQUEUE, KILLED], 1),
        ([DONE, Outcome(1, 3)], 1),
        ([RAISED, HANG, REQUEUE], 76),
        ([RAISED, HANG, BAD, REQUEUE], 2),
    ],
)
def test_code(outcomes: list[Outcome], code: int) -> None:
    assert job_code(outcomes) == code


def test_the_cause_is_the_earliest_failure_that_is_no_consequence() -> None:
    lost = replace(RAISED, rank=0, traceback="closed by peer\n", time=1.0, consequence=True)
    assert explain([lost, RAISED, KILLED], 6).startswith("trainer: rank 4 of 6 failed:\nTraceback\n")
    assert explain([lost, KILLED, DONE], 6) == (
        "trainer: rank 5 of 6: was killed by SIGKILL\n"
        "trainer: as a consequence failed or was stopped: rank 0\n"
    )
    later = replace(RAISED, rank=0, time=2.1)
    assert explain([later, RAISED], 6).startswith("trainer: rank 4 of 6 failed:\n")
    assert explain([lost], 6).startswith("trainer: rank 0 of 6 failed:\n")


def test_a_stop_that_was_asked_for_is_one_line() -> None:
    stopped = Outcome(1, 1, "stopped by SIGTERM: no checkpoint", time=1.0, for_all=True)
    assert explain([RAISED, replace(stopped, rank=0, time=1.1), stopped], 5) == f"trainer: {stopped.line}\n"


def test_what_needs_no_explanation_gets_none() -> None:
    assert explain([DONE, REQUEUE], 2) == ""
    assert explain([BAD, RAISED, KILLED], 6) == "trainer: no such recipe\n"


def test_a_failure_of_torchrun_is_told() -> None:
    error = Outcome(TORCHRUN, 1, traceback="RuntimeError: no store\n")
    silent = Outcome(0, 1, "was stopped", consequence=True)
    assert explain([error, silent], 2).startswith("trainer: torchrun failed:\nRuntimeError: no store\n")


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [
        (3, "ended with exit code 3"),
        (-9, "was killed by SIGKILL (out of memory? see dmesg)"),
        (-40, "was killed by signal 40"),
    ],
)
def test_an_exit_code_in_words(exit_code: int, words: str) -> None:
    assert ending(exit_code) == words


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


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (_raised(KILLED_WORKER), "(pid 12) was killed by SIGKILL (out of memory? see dmesg)"),
        (
            _raised("", KILLED_WORKER, "DataLoader worker (pid(s) 12, 13) exited unexpectedly", TERMINATED),
            "(pid 12) was killed by SIGKILL (out of memory? see dmesg)",
        ),
        (
            _raised(f"InternalTorchDynamoError: RuntimeError: {TERMINATED}\n\nfrom user code"),
            "(pid 12) was killed by SIGTERM",
        ),
        (
            _raised("DataLoader worker (pid 12) exited unexpectedly with exit code 3. Details are lost"),
            "(pid 12) ended with exit code 3",
        ),
        (
            _raised("", "DataLoader worker (pid(s) 12, 13) exited unexpectedly"),
            "(pid 12, 13) ended unexpectedly",
        ),
        (
            _raised("DataLoader worker (pid 12) is killed by signal: Bus error. It is possible that"),
            "(pid 12) was killed by SIGBUS (is /dev/shm full?)",
        ),
        (_raised("the loss is a list", TERMINATED), ""),  # the first error is the cause
        (_raised("something else"), ""),
    ],
)
def test_a_dead_loader_worker_is_one_line(error: BaseException, told: str) -> None:
    assert dead_worker(error) == (f"its loader worker {told}" if told else "")


def test_a_rank_killed_for_memory_is_the_cause(tmp_path: Path) -> None:
    """Its peer fails first, as far as clocks know: the kernel doesn't say when it killed."""
    killed = by_memory(crashed(tmp_path, 0, -signal.SIGKILL), ": out of memory (all full)")
    reset = Outcome(1, 1, "reset", "RuntimeError: recv: Success\n", time=5.0)
    assert explain([reset, killed], 2) == (
        "trainer: rank 0 of 2: was killed by SIGKILL: out of memory (all full)\n"
        "trainer: as a consequence failed or was stopped: rank 1\n"
    )
    assert by_memory(reset, "x") == reset


def test_ranks_are_known_by_their_variables() -> None:
    ours = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    assert is_rank(ours)
    assert not any(is_rank({name: "0" for name in ours if name != missing}) for missing in ours)
