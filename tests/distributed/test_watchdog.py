"""Promise: a rank that hangs is named, with its phase and its step, and the job ends with code 76."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import forked, hangs, preloaded
from tests.helpers.hangs import PHASES, Ending, Hang, Job, hang, is_named, recipe_of, slow
from tests.helpers.refusals import named
from tests.helpers.waiting import SECONDS
from trainer.checkpoint import store
from trainer.config.training import ParallelConfig
from trainer.distributed import watchdog as watchdog_module
from trainer.distributed.parallel import World
from trainer.distributed.watchdog import Place, Watchdog, waited_for
from trainer.errors import EXIT_FAILED, EXIT_HANG, EXIT_REQUEUE, BadInputError, LostPeerError
from trainer.launch import exit_record
from trainer.launch.worker import Worker, leave_now
from trainer.observe import phases

ROOT = Path(__file__).parents[2]
# What all its tests wait for is started once: in one process, also where tests run in several.
pytestmark = pytest.mark.xdist_group("hang")
HANG_S = 4.0  # a rank of a machine that is busy may well stand still for a second
AT_ONCE = 6  # they mostly wait

HANGS = {
    "data": Hang(1, "data", 3),
    "forward": Hang(0, "forward", 4),
    "backward": Hang(1, "backward", 1),
    "communication": Hang(1, "communication", 16),
    "update": Hang(0, "update", 7),
    "evaluation": Hang(1, "evaluation", 8),
    "logging": Hang(0, "logging", 2),
    "checkpoint": Hang(0, "checkpoint", 10),
    "stopped": Hang(0, "stopped", 5),
    "stopped-1": Hang(1, "stopped", 5),
}
# What sets these apart is that the rank has said where it is: `test_each_phase_is_said`.
ALIKE = ("backward", "update", "evaluation", "logging", "checkpoint")


class Apart:
    """A job in a process of its own, whose stderr tells how it ended."""

    def __init__(self, *words: str | Path, **environment: str) -> None:
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._began = time.monotonic()
        self._process = preloaded.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._said,
        )

    def over(self) -> bool:
        return self._process.poll() is not None or time.monotonic() > self._began + SECONDS

    def end(self) -> Ending:
        with self._process, self._said:
            if self._process.poll() is None:
                self._process.kill()
            code = self._process.wait()
            self._said.seek(0)
            return Ending(code, self._said.read(), time.monotonic() - self._began)


JOBS: dict[str, Callable[[], Job | Apart]] = {}


def _job(
    name: str, size: int, *faults: Callable[[int], object], seconds: float = 300.0, **sections: Any
) -> None:
    hang_s = sections.pop("hang_s", HANG_S)
    JOBS[name] = lambda: Job(size, recipe_of(hang_s, **sections), *faults, seconds=seconds)


def _slow_disk(_rank: int) -> None:
    until: Any = store._until

    def slowly(*arguments: Any) -> Iterator[Any]:
        for part in until(*arguments):
            time.sleep(0.1)
            yield part

    forked.replace(store, "_until", slowly)


def _stuck_disk(_rank: int) -> None:
    forked.replace(store, "commit", lambda *_: time.sleep(1000))


for _name, _where in HANGS.items():
    _job(_name, 2, hang(_where))
_job("tree", 2, hang(Hang(1, "backward", 3)), parallel={"reduction": "tree"})
_SHARDED = {"strategy": "hsdp", "shard": 2}
_job("sharded-forward", 4, hang(Hang(2, "forward", 3)), parallel=_SHARDED)
_job("sharded-backward", 4, hang(Hang(1, "backward", 2)), parallel=_SHARDED)
_job("worker", 2, hang(Hang(1, "data", 9)), data={"workers": 1})
_job("alone", 1, hang(Hang(0, "forward", 6)))
_job("network", 2, hang(Hang(0, "communication", 3)), hang(Hang(1, "communication", 3)))
_job("stuck-disk", 1, _stuck_disk)
_job("off", 1, hang(Hang(0, "forward", 1)), hang_s=0, seconds=2 * HANG_S + 1)
# Two forward passes of 2.5 s in a step: rank 0 waits longer than HANG_S, rank 1 makes progress all the time.
_job("slow", 2, slow(1, 2.5, lambda step: step in (3, 4)))
_job("slow-disk", 1, _slow_disk, max_steps=3, checkpoint={"every": 1})


@pytest.fixture(scope="module")
def endings(request: pytest.FixtureRequest) -> dict[str, Ending]:
    """How the jobs end of those tests that were selected: some at a time."""
    words = {word for item in request.session.items for word in re.split(r"[\[\]]", item.name)}
    waiting = [name for name in JOBS if name in words or f"test_{name.replace('-', '_')}" in words]
    running: dict[str, Job | Apart] = {}
    ended: dict[str, Ending] = {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            name = waiting.pop(0)
            running[name] = JOBS[name]()
        for name in [name for name, job in running.items() if job.over()]:
            ended[name] = running.pop(name).end()
        time.sleep(0.02)
    return ended


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in (*ALIKE, "data"))) for name in HANGS]
)
def test_a_hang_is_named(endings: dict[str, Ending], name: str) -> None:
    ending, where = endings[name], HANGS[name]
    assert is_named(ending, where), ending
    waits = rf"; rank {1 - where.rank} waits in [a-z]+, step {where.step}(?! waits)"
    if where.phase not in ("checkpoint", "logging", "update"):  # there the other goes on for a while
        assert re.search(waits, ending.text), ending
    # The culprit says where it is; where it was stopped, another says where it waits.
    assert ("in sleep_forever" in ending.text) == (where.phase != "stopped"), ending
    here = 1 - where.rank if where.phase == "stopped" else where.rank
    assert f"rank {here} is here:" in ending.text


def test_every_phase_is_tried() -> None:
    assert {where.phase for where in HANGS.values()} == set(PHASES)


def test_each_phase_is_said(tmp_path: Path) -> None:
    """Where a rank would hang it has said that it is there; what is made of that is the same everywhere."""
    notes, places = tmp_path / "notes", [HANGS[name] for name in ("forward", *ALIKE)]

    def note() -> None:
        with notes.open("a") as file:
            file.write(f"{phases.PHASE_TIMER.phase} {phases.PHASE_TIMER.step}\n")

    def before() -> None:
        forked.replace(hangs, "sleep_forever", note)
        for where in places:
            hang(where._replace(rank=0))(0)

    assert forked.attempt(tmp_path / "run", recipe_of(60.0), before=before).code == 0
    assert set(notes.read_text().splitlines()) == {f"{where.phase} {where.step}" for where in places}


@pytest.mark.parametrize("phase", phases.PHASES)
def test_each_phase_comes_with_what_to_check(phase: str) -> None:
    line, ranks = waited_for([Place(0, 5, 3, phase)], 1, 10.0)
    assert ranks == [0]
    assert f"hangs in {phase}, step 3; check the " in line.replace("check whether", "check the")


def test_tree(endings: dict[str, Ending]) -> None:
    assert is_named(endings["tree"], Hang(1, "backward", 3)), endings["tree"]
    assert "; rank 0 waits in communication, step 3;" in endings["tree"].text


def test_worker(endings: dict[str, Ending]) -> None:
    assert is_named(endings["worker"], Hang(1, "data", 9)), endings["worker"]
    assert "the loader's workers" in endings["worker"].text


@pytest.mark.parametrize(
    ("name", "where"),
    [
        pytest.param("sharded-forward", Hang(2, "forward", 3), id="sharded-forward"),
        pytest.param(
            "sharded-backward", Hang(1, "backward", 2), id="sharded-backward", marks=pytest.mark.slow
        ),
    ],
)
def test_of_ranks_that_gather_for_each_other_one_is_named(
    endings: dict[str, Ending], name: str, where: Hang
) -> None:
    """Those of its own group wait in a gathering, the other group for the sum over both."""
    assert is_named(endings[name], where), endings[name]


def test_alone(endings: dict[str, Ending]) -> None:
    assert is_named(endings["alone"], Hang(0, "forward", 6)), endings["alone"]
    assert "in sleep_forever" in endings["alone"].text


def test_network(endings: dict[str, Ending]) -> None:
    """Where no rank is behind the others, none is blamed."""
    code, text, _ = endings["network"]
    assert code == EXIT_HANG
    assert "all 2 ranks wait in communication, step 3, and none is behind the others; check the net" in text


def test_stuck_disk(endings: dict[str, Ending]) -> None:
    """It shows when the next checkpoint waits for the one before."""
    assert is_named(endings["stuck-disk"], Hang(0, "checkpoint", 10)), endings["stuck-disk"]


@pytest.mark.slow
def test_off(endings: dict[str, Ending]) -> None:
    assert endings["off"].code == EXIT_FAILED
    assert "no word" in endings["off"].text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["slow", "slow-disk"])
def test_slow_is_no_hang(endings: dict[str, Ending], name: str) -> None:
    code, text, seconds = endings[name]
    assert (code, text) == (0, "")
    assert seconds > 2 * HANG_S


class Looks:
    """An event at which a watchdog waits for its next look; `happens` comes before each."""

    def __init__(self, *happens: Callable[[], object]) -> None:
        self.looks, self._happens = 0, iter(happens)

    def wait(self, _: float) -> bool:
        self.looks += 1
        for happens in self._happens:
            happens()
            return False
        return True


class LeftError(Exception):
    """The watchdog ended the job."""


def watched(monkeypatch: pytest.MonkeyPatch, *happens: Callable[[], object]) -> int:
    """The watchdog over a rank that is alone in step 7; returns the look at which it left, or 0."""

    def leaves(code: int, line: str, *_: object, **__: object) -> None:
        assert code == EXIT_HANG
        raise LeftError(line)

    watchdog = Watchdog(World(0, 1, 0, torch.device("cpu"), None), ParallelConfig(hang_s=20, timeout_s=200))
    phases.PHASE_TIMER.step = 7
    monkeypatch.setattr("trainer.distributed.watchdog.leave_now", leaves)
    looks = Looks(*happens)
    monkeypatch.setattr(watchdog, "stopped", looks)
    try:
        watchdog.watch()
    except LeftError as left:
        assert "no progress for 20 s: rank 0 hangs in" in str(left)
        return looks.looks
    finally:
        phases.PHASE_TIMER.reset()
    return 0


def nothing() -> None:
    pass


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


class Store(dict[str, Any]):
    """A store of ranks in this process."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def append(self, key: str, value: str) -> None:
        self[key] = self.get(key, b"") + value.encode()

    def add(self, key: str, number: int) -> int:
        self[key] = self.get(key, 0) + number
        return int(self[key])

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[Watchdog]:
    """The watchdogs of three ranks."""
    store = Store()
    monkeypatch.setattr(watchdog_module, "store_client", lambda *_: store)
    config = ParallelConfig(hang_s=0.02, timeout_s=200)
    return [Watchdog(World(rank, 3, 0, torch.device("cpu"), None), config) for rank in range(3)]


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

    monkeypatch.setattr(Store, "add", gone)
    assert ranks[1].job_state(True, 7) == ("runs", 7)
    monkeypatch.setattr(Store, "append", gone)
    monkeypatch.setattr(Store, "get", gone)
    places = ranks[1].places_of_all(Place(1, 5, 2, "communication"))
    line, behind = waited_for(places, 3, 4.0)  # it was in rank 0, or on its host
    assert behind == [0] and named(line, "rank 0 rank 1 communication")


def test_no_watch_where_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Watchdog, "watch", lambda _: None
    )  # with no time to wait it would end this process at once
    watchdog = Watchdog(World(0, 1, 0, torch.device("cpu"), None), ParallelConfig(hang_s=0))
    watchdog.start()
    assert watchdog._thread is None


@pytest.mark.slow
def test_a_job_that_was_really_suspended_goes_on() -> None:
    inside = 0.5  # seconds of each forward pass
    job = Job(1, recipe_of(HANG_S, max_steps=4), slow(0, inside))
    until = time.monotonic() + 300
    while not (job.folder / "metrics.jsonl").exists() and not job.over():
        assert time.monotonic() < until, job.end()
        time.sleep(0.02)
    job.send(signal.SIGSTOP)
    time.sleep(2 * HANG_S)
    job.send(signal.SIGCONT)
    assert job.end()[:2] == (0, "")


INJECTED = """
import os
if os.environ.get("RANK") == "1":
    from trainer.train import loop
    original = loop.train_step
    def stuck(run, batches, step):
        if step == 20:
            import time
            run.state.optimizer.step = lambda: time.sleep(1000)
        original(run, batches, step)
    loop.train_step = stuck
"""


class CommandLine(Apart):
    """A user's run, with a fault put in by Python's own start."""

    def __init__(self, ranks: int, injected: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="hang-")
        folder = Path(self._folder.name)
        (folder / "sitecustomize.py").write_text(injected)
        settings = (
            "data.micro_batch_size=32 parallel.hang_s=5 parallel.threads=1 model.width=4 log.to=[jsonl]"
        )
        words = f"train digits --nproc-per-node {ranks} " + " ".join(
            f"--set {setting}" for setting in settings.split()
        )
        super().__init__(
            "-m", "trainer", *words.split(), "--out", folder / "run", PYTHONPATH=f"{folder}:{ROOT}"
        )

    def end(self) -> Ending:
        with self._folder:
            return super().end()


JOBS["the-command-line-says-who-hangs"] = lambda: CommandLine(2, INJECTED)
GIL = INJECTED.replace('if os.environ.get("RANK") == "1":', "if True:")  # a rank may be a fork
GIL = GIL.replace("import time\n", "import ctypes\n")
JOBS["code-that-holds-the-gil"] = lambda: CommandLine(
    1, GIL.replace("time.sleep(1000)", "ctypes.PyDLL(None).sleep(1000)")
)


def test_the_command_line_says_who_hangs(endings: dict[str, Ending]) -> None:
    code, text, _ = endings["the-command-line-says-who-hangs"]
    assert code == EXIT_HANG, text
    head, *rest = text.splitlines()
    assert head.startswith("trainer: no progress for 5 s: rank 1 hangs in update, step 21; rank 0 waits in")
    assert "rank 1 is here:" in rest
    assert rest[-1].startswith("trainer: the run folder is ")
    assert "time.sleep(1000)" in rest[-2] or "sitecustomize.py" in rest[-2]


def test_code_that_holds_the_gil(endings: dict[str, Ending]) -> None:
    """No thread of ours runs then: the launcher takes what faulthandler writes for a hang record."""
    code, text, _ = endings["code-that-holds-the-gil"]
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


# --- who is blamed ---


def _told(places: list[Place], size: int = 0) -> tuple[str, list[int]]:
    numbered = [place._replace(rank=number) for number, place in enumerate(places)]
    line, ranks = waited_for(numbered, size or len(places), 30.0)
    return line.partition("; check")[0], ranks


WAITS, BEHIND = Place(0, 200, 13, "communication"), Place(0, 120, 13, "data")


def test_many_ranks_are_a_short_line() -> None:
    line, ranks = _told([*[WAITS] * 1000, BEHIND])
    assert ranks == [1000]
    assert line == (
        "no progress for 30 s: rank 1000 hangs in data, step 13; 1000 others wait in communication, step 13"
    )
    line, ranks = _told([*[BEHIND] * 5, WAITS, WAITS])
    assert ranks == [0, 1, 2, 3, 4]
    assert line.startswith("no progress for 30 s: ranks 0, 1 and 3 more hang in data, step 13; 2 others wait")
    moved = WAITS._replace(step=14)
    assert _told([moved, moved, WAITS, BEHIND])[0].endswith(
        "; 3 others wait, most of them in communication, step 14"
    )


def test_all_in_one_place() -> None:
    assert _told([BEHIND, BEHIND]) == ("no progress for 30 s: ranks 0 and 1 hang in data, step 13", [0, 1])
    line, ranks = _told([WAITS, WAITS])
    assert named(line, "2 communication, step 13") and ranks == [0, 1]


def test_a_silent_rank_is_the_one() -> None:
    """Stopped in a collective it may have made more phases than those that wait for it there."""
    line, ranks = _told([WAITS, BEHIND], 3)
    assert ranks == [2] and named(line, "rank 2")


def test_ranks_that_are_done_are_not_waited_for() -> None:
    done = Place(0, 100, 16, "done")
    assert _told([done, WAITS._replace(phase="checkpoint")])[1] == [1]


def test_hosts_are_told_where_there_are_several() -> None:
    line, _ = _told([WAITS._replace(host="a"), BEHIND._replace(host="b")])
    assert " s: rank 1 on b hangs in data" in line


def test_a_step_that_compiles_has_more_time() -> None:
    watched = Watchdog(World(0, 1, 0, torch.device("cpu"), None), ParallelConfig(hang_s=30, timeout_s=200))
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
    assert Watchdog(watched._world, ParallelConfig(hang_s=300, timeout_s=200)).allowed_seconds() == 1000


def test_without_the_launcher_the_rank_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = exit_record.ExitRecord(0, EXIT_HANG, "rank 0 hangs", "rank 0 is here:\n  File\n", for_all=True)
    Worker().write_exit_record(outcome)
    assert capsys.readouterr().err == "trainer: rank 0 hangs\nrank 0 is here:\n  File\n"
    stuck = exit_record.ExitRecord(1, EXIT_HANG, "rank 0 hangs", time=0.0, for_all=True, consequence=True)
    killed = exit_record.ExitRecord(2, EXIT_FAILED, "was killed")
    wanted = "trainer: rank 0 hangs\nrank 0 is here:\n  File\n"
    assert exit_record.exit_message([stuck, outcome, killed], 3) == wanted
    assert exit_record.job_code([stuck, outcome, killed]) == EXIT_HANG


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
    process.join(300)
    assert process.exitcode == EXIT_HANG
    end = time.monotonic() + 300
    stat = Path(f"/proc/{child}/stat")
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < end, stat.read_text()
        time.sleep(0.02)
