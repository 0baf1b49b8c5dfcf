"""The launcher restores what torchrun hides, and nothing is left behind.

Launchers, torchrun and ranks are real processes, forks of one that has imported torch.
"""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import preloaded
from tests.helpers.planted import write
from tests.helpers.programs import ran
from tests.helpers.refusals import named
from tests.helpers.waiting import SECONDS, until, until_gone
from trainer.launch import launcher
from trainer.launch.exit_record import ExitRecord

ROOT = Path(__file__).parents[2]
WORKER = "tests.helpers.launch_worker"
PIPES = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
START = (
    "import json, os, sys, time; from pathlib import Path; from types import SimpleNamespace\n"
    "from trainer.launch import launcher\n"
    "stands = Path(sys.argv[2], 'time-stands')  # while that is there, no time passes for the launcher\n"
    "now = lambda: 0.0 if stands.exists() else time.monotonic()\n"
    "launcher.time = SimpleNamespace(sleep=time.sleep, monotonic=now)\n"
    # The first is waited for; within the second torchrun says how a rank ended that left no word.
    "launcher._AFTER_FAILURE_SECONDS, launcher._TORCHRUN_SECONDS = 0.5, 600.0\n"
    "launcher._AFTER_SECOND_INTERRUPT_SECONDS = 0.1\n"
    "if os.isatty(0): os.close(os.open(os.ttyname(0), os.O_RDWR))  # makes it the controlling terminal\n"
    "asked = json.loads(sys.argv[1])\n"
    "local = launcher.LocalRanks(asked.pop('processes'), asked.pop('threads'))\n"
    f"sys.exit(launcher.launch('{WORKER}', {{'words': sys.argv[2:]}}, local, **asked).code)"
)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Launcher:
    """A launcher under test, its ranks' folder, and the folder for its temporary files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.temporary = folder / "ranks", folder / "temporary"
        self.process: subprocess.Popen[str]

    def start(
        self,
        *what: str,
        environment: Mapping[str, str] = {},
        streams: Mapping[str, int] = PIPES,
        **options: Any,
    ) -> None:
        """Starts `launch` in a process of its own; two ranks unless `options` says otherwise."""
        self.folder.mkdir(exist_ok=True)
        self.temporary.mkdir(exist_ok=True)
        asked = json.dumps({"processes": 2, "threads": 1, "grace_seconds": SECONDS, **options})
        words = [sys.executable, "-c", START, asked, str(self.folder), *what]
        own: Any = {"env": {**os.environ, "TMPDIR": str(self.temporary), **environment}, **streams}
        self.process = preloaded.Popen(words, cwd=ROOT, text=True, **own)

    def ready(self, processes: int = 2) -> list[int]:
        """The pids of the ranks, once each can take signals."""
        files = [self.folder / f"ready-{rank}" for rank in range(processes)]
        until(lambda: all(file.exists() and file.read_text() for file in files))
        return [int(file.read_text()) for file in files]

    def signals(self, rank: int) -> list[str]:
        file = self.folder / f"signals-{rank}"
        return file.read_text().split() if file.exists() else []

    def until_told(self, count: int) -> None:
        """Waits until both ranks have taken so many signals."""
        until(lambda: all(len(self.signals(rank)) == count for rank in range(2)))

    def starts(self, rank: int = 0) -> int:
        return len((self.folder / f"starts-{rank}").read_text().split())

    def end(self) -> tuple[int, str]:
        """The exit code and what the user read; nothing may be left of the job."""
        try:
            out, err = self.process.communicate(timeout=SECONDS)
        finally:
            self.process.kill()
        assert list(self.temporary.iterdir()) == []
        until_gone(*(int(file.read_text()) for file in self.folder.glob("ready-*")))
        return self.process.returncode, (out or "") + (err or "")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Launcher]:
    one = Launcher(tmp_path)
    yield one
    if hasattr(one, "process"):  # where a test failed
        one.process.kill()


def test_a_rank_that_raises_ends_the_others_in_a_collective(run: Launcher) -> None:
    run.folder.mkdir()
    (run.folder / "time-stands").touch()  # both end by themselves, however late rank 1's word is
    run.start("0=collective", "1=fail-in-collective")
    code, text = run.end()
    lines = text[text.index("trainer: rank 1 of 2") :].splitlines()  # after gloo's own
    assert code == 1 and lines[-2] == "ValueError: rank 1 is broken" and named(lines[-1], "rank 0")
    assert text.count("Traceback (most recent call last)") == 1 and "elastic" not in text


def test_signals_reach_each_rank_once(run: Launcher) -> None:
    run.start("obey-three")
    os.kill(_parent(run.ready()[0]), signal.SIGUSR1)  # torchrun gets it too: Slurm signals every process
    run.process.send_signal(signal.SIGUSR1)
    run.until_told(1)
    run.process.send_signal(signal.SIGUSR1)
    run.process.send_signal(signal.SIGTERM)
    run.until_told(2)
    run.process.send_signal(signal.SIGTERM)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == (75, "")
    assert sorted(run.signals(0)) == sorted(run.signals(1)) == ["SIGINT", "SIGTERM", "SIGUSR1"]


def test_a_signal_before_the_ranks_are_there_waits_for_them(run: Launcher) -> None:
    run.start("obey-late")
    until(lambda: list(run.temporary.iterdir()))
    run.process.send_signal(signal.SIGTERM)
    (run.folder / "signal-sent").touch()
    assert run.end() == (75, "")
    assert run.signals(0) == run.signals(1) == ["SIGTERM"]


def test_ctrl_c_reaches_each_rank_once_and_a_second_one_ends_it_at_once(run: Launcher) -> None:
    master, slave = pty.openpty()
    run.start("sleep", processes=1, streams={**dict.fromkeys(PIPES, slave), "start_new_session": True})
    os.close(slave)
    run.ready(1)
    os.write(master, b"\x03")
    until(lambda: run.signals(0))
    time.sleep(0.2)  # in which it could come a second time
    assert run.signals(0) == ["SIGINT"]
    assert run.process.poll() is None
    os.write(master, b"\x03")
    assert run.end()[0] == 1
    assert named(os.read(master, 10000).decode(), "SIGINT")


def test_kill_9_of_the_launcher_leaves_no_orphan(run: Launcher) -> None:
    run.start("sleep")
    pids = set(run.ready())
    pids |= {_parent(pid) for pid in pids}
    assert len(pids) == 3  # two ranks and the torchrun that started both
    run.process.kill()
    run.process.wait()
    until_gone(*pids)
    assert not list(run.temporary.rglob("request-*"))  # which may hold tokens


def test_a_rank_that_torchrun_stops_while_it_prepares_is_no_cause(run: Launcher) -> None:
    run.start("0=prepare", "1=hang")
    assert run.end()[0] == 76


def test_a_rank_that_ignores_the_signal_is_killed_after_the_grace(run: Launcher) -> None:
    run.start("0=obey", "1=sleep", grace_seconds=1.5)
    pids = run.ready()
    (run.folder / "time-stands").touch()
    run.process.send_signal(signal.SIGTERM)
    until(lambda: run.signals(1))
    until_gone(pids[0])  # within the grace, however slow the machine is
    (run.folder / "time-stands").unlink()
    code, text = run.end()
    assert code == 1 and named(text, "rank 1 of 2 1.5 SIGTERM")


def test_arguments_and_variables_arrive_and_one_rank_can_ask_for_a_requeue(run: Launcher) -> None:
    words = ["$$HOME", "${local_rank}", "--signal", "--r", "--", "a b", ""]
    foreign = {"PET_MAX_RESTARTS": "3", "PET_NO_PYTHON": "1", "PET_NPROC_PER_NODE": "7"}
    run.start("tell", *words, environment={**foreign, "OMP_NUM_THREADS": "9"}, threads=3)
    assert run.end() == (75, "")
    assert not (run.folder / "signals-0").exists()  # the rank that was not ready yet ended in peace
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "3")
    told = json.loads((run.folder / "told-1").read_text())
    assert told == {"arguments": words, **threads, "WORLD_SIZE": "2", "COLOR": None}


def test_ranks_import_what_the_launcher_imported(tmp_path: Path) -> None:
    """Not what lies in the working folder, where a container often has a checkout of this project."""
    start = f"import json, sys; print(json.dumps(sys.path))\n{START}"
    # A file, so that the working folder isn't on the launcher's own path.
    write(tmp_path, {"here/trainer/__init__.py": "raise SystemExit('the wrong trainer')", "start.py": start})
    others = {name: value for name, value in os.environ.items() if not name.startswith("TRAINER_")}
    asked = json.dumps({"processes": 1, "threads": 1})
    words = (sys.executable, tmp_path / "start.py", asked, tmp_path, "tell-paths")
    ended = ran(*words, cwd=tmp_path / "here", env={**others, "PYTHONPATH": str(ROOT)}, timeout=300)
    assert (ended.returncode, ended.stderr) == (0, "")
    wanted = [str(ROOT / "trainer/__init__.py"), json.loads(ended.stdout), [], WORKER]
    assert json.loads((tmp_path / "paths-0").read_text()) == wanted


@pytest.mark.parametrize(
    ("codes", "asked"),
    [([1, 0], ["never", "auto"]), ([1, 1, 0], ["never", "auto"]), ([2, 0], ["never"]), ([75, 0], ["never"])],
)
def test_a_restart_resumes_what_this_launch_began(
    codes: list[int], asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing that was there before may be resumed; after 2 and 75 nothing is started again."""
    seen: list[str] = []

    def run(_: object, __: str, request: Any, *___: object) -> tuple[list[ExitRecord], dict[str, Any]]:
        seen.append(request["resume"])
        return [ExitRecord(0, codes[len(seen) - 1])], {"resume": "auto"}

    monkeypatch.setattr(launcher.WorkerGroup, "run", run)
    local = launcher.LocalRanks(1, 1)
    launched = launcher.launch("module", {"resume": "never"}, local, max_restarts=1)
    assert (launched.code, seen) == (codes[len(asked) - 1], asked)


@pytest.mark.parametrize(
    ("what", "code", "text"),
    [
        ("hang", 76, "trainer: rank 0 of 1: no step for 600 s\n"),
        ("hang-in-exit", 0, ""),  # all is done, and it is killed after the grace
    ],
)
def test_one_rank_keeps_its_code(run: Launcher, what: str, code: int, text: str) -> None:
    run.start(what, processes=1, max_restarts=1, grace_seconds=0.5)
    assert (run.end(), run.starts()) == ((code, text), 1)


def test_one_rank_that_raises_shows_its_traceback(run: Launcher) -> None:
    run.start("once", processes=1, max_restarts=1, environment={"COLOR": "blue"})
    code, text = run.end()
    assert code == 0 and text.startswith("trainer: rank 0 of 1 failed:\nTraceback (most recent call last):\n")
    assert 'worker.py", line' in text and "<module>" not in text  # from what the rank was asked for on
    assert text.endswith("ValueError: rank 0 is broken\ntrainer: starting again (1 of 1)\n")


def test_a_stop_without_checkpoint_is_one_line(run: Launcher) -> None:
    run.start("stop", processes=1, max_restarts=1)
    run.ready(1)
    run.process.send_signal(signal.SIGHUP)  # the terminal closed
    code, text = run.end()
    assert code == 1 and named(text, "SIGTERM") and text.count("\n") == 1 and run.starts() == 1


def test_what_a_rank_leaves_behind_is_ended(run: Launcher) -> None:
    run.start("leave-a-child", processes=1)
    assert run.end() == (0, "")
    until_gone(int((run.folder / "child").read_text()))


def test_kill_9_of_a_rank_is_named(run: Launcher) -> None:
    run.start("sleep")
    os.kill(run.ready()[1], signal.SIGKILL)
    code, text = run.end()
    cause, consequence = text.splitlines()
    assert code == 1 and named(cause, "rank 1 of 2 SIGKILL") and named(consequence, "rank 0")


def test_a_fault_in_native_code_shows_where(run: Launcher) -> None:
    run.start("crash", processes=1)
    code, text = run.end()
    assert code == 1 and named(text, "rank 0 of 1 SIGSEGV launch_worker.py")
