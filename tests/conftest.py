"""What tests share."""

import faulthandler
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Before torch can look: the tests start ranks by the dozen as if there were no GPU. Only those of tests/gpu,
# called by that name (or by -m gpu), get to see one, with what cuBLAS needs to repeat itself. A worker of
# pytest-xdist has the environment of who started it.
if not os.environ.get("PYTEST_XDIST_WORKER"):
    if any("gpu" in Path(word.partition("::")[0]).parts for word in sys.argv[1:]):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
import torch
from hypothesis import HealthCheck, settings
from tqdm import tqdm  # type: ignore[import-untyped]

from tests.helpers import preloaded
from tests.helpers.forked import attempt
from tests.helpers.world import Ranks
from trainer.config.user_file import folders_closed
from trainer.host.limits import read_limits
from trainer.launch import folder as folder_module, launcher
from trainer.launch.folder import Launch
from trainer.observe.console import set_verbosity

# pytest lets faulthandler wait for a test without an end; a fork hangs where it ends that, or begins its own.
os.register_at_fork(before=faulthandler.cancel_dump_traceback_later)

# Its thread, which watches bars, would stay: a process with threads forks no workers of a loader.
tqdm.monitor_interval = 0

# multiprocessing's server of forks imports torch once, for all that it forks.
multiprocessing.set_forkserver_preload(["trainer.data.loader", "trainer.data.formats.decode"])

# A shell starts what it puts in the background (`make test &`) with interrupts ignored, and the
# processes that the tests interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # so does nohup with hangups
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


# A few examples, always the same: where a test fails, the change made it fail. `make test-all` draws many.
_QUIET: Any = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}
settings.register_profile("few", max_examples=20, derandomize=True, **_QUIET)
settings.register_profile("many", max_examples=200, **_QUIET)
settings.load_profile("few")


@pytest.fixture(scope="session", autouse=True)
def _no_commit() -> Iterator[None]:
    """No commit for runs to name: one in this checkout while tests run would be a difference to a replay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GIT_CEILING_DIRECTORIES", str(Path(__file__).parents[1]))
        yield


@pytest.fixture(scope="session", autouse=True)
def _preloaded_ranks() -> Iterator[None]:
    """Ranks of a launcher in a test's own process are forks that needn't import torch."""
    forking = types.ModuleType("subprocess")
    vars(forking).update(vars(subprocess), Popen=preloaded.Popen)

    def write_launch(folder: Path, launch: Launch) -> None:
        folder_module.write_launch(folder, replace(launch, parent=preloaded.parent()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "subprocess", forking)
        patch.setattr(launcher, "write_launch", write_launch)
        yield


@pytest.fixture(autouse=True)
def _one_run() -> Iterator[None]:
    """Closes the folders of users' files, and forgets --quiet: a process has those of one run."""
    with folders_closed():
        yield
    set_verbosity("normal")


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which may be left out
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    # One more than cores, for the time that tests wait for processes of their own; the slow ones wait more,
    # Slurm's for minutes. Not more than 8, because many start two ranks or workers.
    more = 2 if config.getoption("--hypothesis-profile") == "many" else 1
    return max(1, min(int(read_limits().cpus) + more, 8))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("peft") is None:
        for item in items:
            if item.get_closest_marker("oracles"):
                item.add_marker(pytest.mark.skip(reason="needs TRL and peft: make oracles"))
    # The slow tests first: one of them takes ten minutes, and the others fill the time beside it.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    # With torch 2.14 some backward passes start threads, and a process that has them can't fork ranks any
    # more: the tests that fork come first there.
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14):
        items.sort(key=lambda item: not _forks(getattr(item, "module", None)))
    # What a module's fixture makes is made once, not in each of pytest-xdist's workers.
    for item in items:
        if item.get_closest_marker("xdist_group") is None and _shares(item):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def _forks(module: Any) -> bool:
    """Whether a module has a helper that starts ranks by a fork."""
    helpers = {f"tests.helpers.{name}" for name in ("forked", "trained", "hangs", "plugged", "poison")}
    found = [] if module is None else list(vars(module).values())
    return any(getattr(one, "__module__", None) in helpers for one in found)


def _shares(item: pytest.Item) -> bool:
    """Whether a test uses a fixture that is made once for its module."""
    found = item._fixtureinfo.name2fixturedefs.values() if isinstance(item, pytest.Function) else ()
    return any(fixtures[-1].scope == "module" for fixtures in found)


def pytest_collection() -> None:
    gc.disable()  # what is imported and collected stays


def pytest_collection_finish() -> None:
    gc.enable()
    _freeze()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path != item.path:
        _freeze()


def _freeze() -> None:
    # What was imported and collected is millions of objects that stay: unless frozen, a full collection
    # takes a second, in each test that asks for one, and each fork copies the pages that it looks at.
    gc.collect()
    gc.freeze()


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """No letter for a test that was skipped: the summary says it, by reason."""
    return ("skipped", "", "SKIPPED") if report.skipped and not hasattr(report, "wasxfail") else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says what was skipped and why, each reason once."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in reports)
    if reasons:
        terminalreporter.section("skipped")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:5} {reason}")


@pytest.fixture(scope="session", autouse=True)
def ranks() -> Iterator[Ranks]:
    # First of all: a process that has run a backward pass must not fork ranks any more.
    started = Ranks()
    yield started
    started.close()


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learned the digits a little; nobody changes its files."""
    from tests.helpers.trained import train_digits  # here: not every test needs what it imports

    return train_digits(tmp_path_factory.mktemp("runs") / "digits")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    # CPU results depend on the number of threads: one, so that what is compared can be compared.
    torch.set_num_threads(1)


# Runs that several test files look at; none changes them.


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 steps with a row each second one and evaluations after 8 and 16."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert attempt(folder).code == 0
    return folder


@pytest.fixture(scope="session")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stopped after step 8: checkpoints of steps 5 and 8."""
    folder = tmp_path_factory.mktemp("runs") / "stopped"
    assert attempt(folder, stop_at=8).code == 75
    return folder
