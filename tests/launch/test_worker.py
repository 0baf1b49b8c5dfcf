"""A process is a rank from the opening of its Worker to the end of it, and tells its end once."""

import faulthandler
import json
import os
import signal
import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.config.recipe_file import load_recipe
from trainer.errors import EXIT_HANG, EXIT_REQUEUE, BadInputError
from trainer.host.affinity import CpuShares
from trainer.launch import worker
from trainer.launch.exit_record import ExitRecord, read_exit_record
from trainer.launch.folder import Launch, take_request, write_launch, write_request
from trainer.launch.nodes import is_rank
from trainer.launch.signals import SIGNALS
from trainer.launch.worker import Worker, current, requested
from trainer.runs.manifest import BegunFrom, Pretrained
from trainer.train.options import StartingPoint
from trainer.train.request import PreparedRun, Request, as_json, from_json


def in_a_fork(check: Callable[[], object]) -> None:
    """Lets a fork be the rank: handlers, signal mask and faulthandler are pytest's here."""
    if not (child := os.fork()):
        try:
            check()
            os._exit(0)
        finally:
            sys.stderr.flush()
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def launched(folder: Path) -> Path:
    write_launch(folder, Launch(sys.path, os.getpid(), CpuShares(), False))
    return folder


def test_a_ranks_fork_is_no_rank(tmp_path: Path) -> None:
    """A loader's worker, say: SIGTERM ends it, and it has no flag."""

    def check() -> None:
        with Worker(tmp_path):
            if not (child := os.fork()):
                alone = current() is None and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
                os._exit(0 if alone else 3)
            _, status = os.waitpid(child, 0)
        assert status == 0  # out here: the Worker takes an exception for the rank's end

    launched(tmp_path)
    in_a_fork(check)


@pytest.mark.parametrize(("raises", "code", "exit_code"), [(False, 75, 0), (True, 2, 2)])
def test_what_a_rank_took_is_given_back_however_it_ends(
    tmp_path: Path, raises: bool, code: int, exit_code: int
) -> None:
    def check() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        before = {number: signal.getsignal(number) for number in SIGNALS}
        with Worker(tmp_path) as rank:
            assert current() is rank
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert faulthandler.is_enabled() and (tmp_path / "rank-0.fault").exists()
            assert (tmp_path / "rank-0.pid").read_text() == str(os.getpid())
            worker.hold(object())
            os.kill(os.getpid(), signal.SIGUSR1)
            assert requested() is signal.SIGUSR1
            if raises:
                raise BadInputError("no such recipe")
            rank.code = EXIT_REQUEUE
        assert {number: signal.getsignal(number) for number in SIGNALS} == before
        assert set(SIGNALS) <= signal.pthread_sigmask(signal.SIG_BLOCK, ())
        assert (current(), requested()) == (None, None)
        assert not faulthandler.is_enabled()
        # From here on nothing changes the exit code.
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert rank.exit_code == exit_code

    launched(tmp_path)
    in_a_fork(check)
    assert read_exit_record(tmp_path, 0).code == code


def test_the_first_word_about_the_end_counts(tmp_path: Path) -> None:
    """A watchdog's thread and the main thread may both have one."""

    def check() -> None:
        with Worker(tmp_path) as rank:
            rank.write_exit_record(ExitRecord(0, EXIT_HANG, "rank 1 hangs", for_all=True))
            raise RuntimeError("closed by peer")
        assert rank.exit_code == EXIT_HANG

    launched(tmp_path)
    in_a_fork(check)
    assert read_exit_record(tmp_path, 0).line == "rank 1 hangs"


def test_nobody_else_reads_what_ranks_are_asked_for(tmp_path: Path) -> None:
    request = {"recipe": {"about": "password=hunter2"}}
    write_request(launched(tmp_path), request, range(4, 6))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"launch.json": 0o600, "request-4.json": 0o600, "request-5.json": 0o600}
    assert [take_request(tmp_path, rank) for rank in (4, 5)] == [request, request]
    assert [path.name for path in tmp_path.iterdir()] == ["launch.json"]  # whatever becomes of the launcher


def test_what_a_rank_starts_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)

    def check() -> None:  # in a fork: a rank that has ended takes no more signals
        before = is_rank(os.environ)
        with Worker():
            meanwhile = is_rank(os.environ)
        assert (before, meanwhile, is_rank(os.environ)) == (True, False, True)

    in_a_fork(check)


def test_a_request_arrives_as_it_was_made() -> None:
    recipe = load_recipe("gpt2-124m", ["optim.lr=0.1", "seed=7"])
    request = Request(recipe, "mine", Path("/runs/x"), "force", 7, "torch", "trainer train")
    source = StartingPoint(Path("/runs/y"), "best", "y@best")
    for one in (request, replace(request, source=source, settings=["seed=7"])):
        assert from_json(Request, json.loads(json.dumps(as_json(one)))) == one
    begun_from = BegunFrom(folder="/runs/y", run_id="00ff", step=3, hash="ff", differs=["seed: 0, now 7"])
    weights = Pretrained(source="hub:a/b@main", revision="1" * 40, sha256="2" * 64)
    prepared = PreparedRun(recipe, "mine", Path("/runs/x"), begun_from=begun_from, pretrained=weights)
    for told in (prepared, replace(prepared, ended=("finished", 0))):
        assert from_json(PreparedRun, json.loads(json.dumps(as_json(told)))) == told
