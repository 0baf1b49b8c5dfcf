"""A copy of the checkout in which a mutant stands, and its tests, in a fork of a process with the libraries.

So a mutant costs a second more than its tests. A test that fails without a mutant, too, sees nothing.
"""

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest

ROOT = Path(__file__).parents[2]
_PRELOADED = ("hypothesis", "numpy", "PIL.Image", "pyarrow.parquet", "pydantic", "torch", "torchvision")
T = TypeVar("T")
_HANG_S = 120.0  # a test that runs longer than this with a mutant has failed


class Tried(NamedTuple):
    """Cases that failed because of a mutant, and how many began."""

    saw: list[str]
    began: int


class Copy:
    """A copy of the files that git tracks, as they are now."""

    def __init__(self, folder: Path) -> None:
        """Makes it in a new folder."""
        folder.mkdir()
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
        words = ["tar", "--null", "-T", "-", "-cf", "-"]
        packed = subprocess.run(words, cwd=ROOT, input=listed, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-xf", "-", "-C", folder], input=packed, check=True)
        self.folder = folder
        self._time = int(time.time())
        self._sound, self._odd = set[str](), set[str]()  # cases that pass, or fail, without a mutant

    def try_mutant(
        self, file: str, text: str, cases: Sequence[str], seconds: float, first: bool = False
    ) -> Tried:
        """Runs cases, tests or files in this order, while a file of the checkout has another text.

        Cases that had not begun after so many seconds are left out; `first` ends at the first that fails.
        """
        path = self.folder / file
        whole = path.read_text()
        self._write(path, text)
        try:
            failed, began = _run(cases, self.folder, seconds, first) if cases else ([], 0)
        finally:
            self._write(path, whole)
        if fresh := [case for case in failed if case not in self._sound | self._odd]:
            fails_anyway = set(_run(fresh, self.folder, len(fresh) * _HANG_S, False)[0])
            self._odd |= fails_anyway
            self._sound |= set(fresh) - fails_anyway
        return Tried([case for case in failed if case in self._sound], began)

    def _write(self, path: Path, text: str) -> None:
        """Writes a file with a time of its own: bytecode counts as its if size and second are the same."""
        path.write_text(text)
        self._time += 2
        os.utime(path, (self._time, self._time))


def in_jobs(mutants: Sequence[T], jobs: int, work: Callable[[Sequence[T], Copy], int]) -> int:
    """Shares mutants out among forks, each with its copy; the sum of what they return (up to 255 each)."""
    for name in _PRELOADED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="trainer-mutants-") as folder:
        started = list[int]()
        for number in range(jobs):
            if not (job := os.fork()):
                os._exit(min(255, work(mutants[number::jobs], Copy(Path(folder, str(number))))))
            started.append(job)
        return sum(os.waitstatus_to_exitcode(os.waitpid(job, 0)[1]) for job in started)


class _Recorder:
    """Plugin of pytest: runs these cases alone; writes a line when one begins, and when it fails."""

    def __init__(self, file: Path, cases: Sequence[str]) -> None:
        self._file = file.open("a", buffering=1)
        self._places = {case: place for place, case in enumerate(cases)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        found = [(place, item) for item in items if (place := self._place(item.nodeid)) is not None]
        items[:] = [item for _, item in sorted(found, key=lambda pair: pair[0])]

    def _place(self, case: str) -> int | None:
        names = (case, case.partition("[")[0], case.partition("::")[0])
        return next((self._places[name] for name in names if name in self._places), None)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._file.write(f"begins {nodeid}\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._file.write(f"fails {report.nodeid}\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._file.write(f"begins {report.nodeid}\nfails {report.nodeid}\n")


def _run(cases: Sequence[str], copy: Path, seconds: float, first: bool) -> tuple[list[str], int]:
    """Runs cases in a fork, in the copy; returns those that failed, and how many began."""
    told = copy.with_suffix(".told")
    told.write_text("")
    child = os.fork()
    if not child:
        os.setsid()
        log = os.open(copy.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(log, number)
        os.chdir(copy)
        for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "trainer")]:
            del sys.modules[name]
        sys.path[:] = [str(copy), *(path for path in sys.path if path not in (str(ROOT), ""))]
        os.environ["PYTHONPATH"] = str(copy)
        sys.argv = ["pytest"]
        marks = "not slow and not container"
        words = ["-q", "-p", "no:cacheprovider", "-m", marks, *(["-x"] if first else [])]
        files = dict.fromkeys(case.partition("::")[0] for case in cases)
        pytest.main([*words, *filter(os.path.exists, files)], plugins=[_Recorder(told, cases)])
        os._exit(0)
    end, last, since = time.monotonic() + seconds + _HANG_S, "", time.monotonic()
    while not os.waitpid(child, os.WNOHANG)[0]:
        time.sleep(0.05)
        lines = told.read_text().splitlines()
        now = lines[-1] if lines else ""
        if now != last:
            last, since = now, time.monotonic()
        hangs = time.monotonic() - since > _HANG_S
        if hangs and last.startswith("begins"):
            with told.open("a") as file:
                file.write(last.replace("begins", "fails", 1) + "\n")
        if hangs or time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
    else:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what a test left behind
    lines = told.read_text().splitlines()
    failed = [line.removeprefix("fails ") for line in lines if line.startswith("fails ")]
    return list(dict.fromkeys(failed)), sum(line.startswith("begins ") for line in lines)
