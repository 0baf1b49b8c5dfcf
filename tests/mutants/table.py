"""`make mutant-table`: for each mutant, all fast tests that see it, in a file that goes on where it stopped.

A mutant is tried on the tests that ran its lines, by a coverage database with a context for each test.
Tests run in a fork of a process that has imported the libraries, in a copy of the checkout: a mutant costs a
second more than its tests. A test that fails without a mutant, too, sees nothing.
"""

import argparse
import contextlib
import importlib
import json
import os
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest
from coverage.numbits import numbits_to_nums

from tests.mutants.__main__ import HERE, ROOT, copy_of_checkout, read_mutants
from tests.mutants.generated import Generated, generate

TABLE = HERE / "table.jsonl"
DATABASE, TIMES = ROOT / "build/mutants/coverage.db", ROOT / "build/mutants/times.xml"
_PRELOADED = (
    "hypothesis",
    "numpy",
    "PIL.Image",
    "pyarrow.parquet",
    "pydantic",
    "torch",
    "torchvision",
    "rich.progress",
)
_HANG_S = 120.0  # a test that runs longer than this with a mutant has failed


class Row(NamedTuple):
    """Tests that `saw` a mutant, of `tried` cases out of `cases` that ran its lines."""

    key: str
    what: str
    saw: list[str]
    tried: int
    cases: int


class _Cases(NamedTuple):
    """Cases of tests by the lines that they ran, and their seconds."""

    database: Path
    seconds: Mapping[str, float]

    def of(self, mutant: Generated) -> list[str]:
        """Cases that ran a line of the mutant, quick ones first."""
        with sqlite3.connect(self.database) as connection:
            rows = connection.execute(
                "select context, numbits from line_bits join context on context.id = context_id"
                " join file on file.id = file_id where file.path like ?",
                (f"%/{mutant.file}",),
            ).fetchall()
        lines = set(range(mutant.first, mutant.last + 1))
        # A context of a fork of a server has two names.
        found = {case.rpartition("|")[2] for case, bits in rows if lines & set(numbits_to_nums(bits))}
        found &= self.seconds.keys()
        return sorted(found, key=lambda case: self.seconds[case])


def read_table(file: Path) -> dict[str, Row]:
    """Rows by key."""
    if not file.exists():
        return {}
    rows = (Row(**json.loads(line)) for line in file.read_text().splitlines())
    return {row.key: row for row in rows}


def mutants_of(root: Path) -> Iterator[Generated]:
    """The mutants of tests/mutants/*.yaml, and generated ones."""
    for file in sorted(HERE.glob("*.yaml")):
        for mutant in read_mutants(file):
            source = (root / mutant.file).read_text()
            first = source[: source.index(mutant.old)].count("\n") + 1
            last = first + mutant.old.rstrip("\n").count("\n")
            lines = source.splitlines(keepends=True)[first - 1 : last]
            text = "".join(lines).replace(mutant.old, mutant.new)
            yield Generated(f"{mutant.file}:{mutant.what}", mutant.what, mutant.file, first, last, text)
    yield from generate(root)


def _seconds(file: Path) -> dict[str, float]:
    seconds = dict[str, float]()
    for case in ElementTree.parse(file).iter("testcase"):
        if case.find("skipped") is None and case.find("failure") is None and case.find("error") is None:
            name = f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"
            seconds[name] = float(case.attrib["time"])
    return seconds


class _Recorder:
    """Plugin of pytest: runs these cases alone; writes a line when one begins, and when it fails."""

    def __init__(self, file: Path, cases: Sequence[str]) -> None:
        self._file = file.open("a", buffering=1)
        self._places = {case: place for place, case in enumerate(cases)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self._places]
        items.sort(key=lambda item: self._places[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._file.write(f"begins {nodeid}\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._file.write(f"fails {report.nodeid}\n")


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
        words = [
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            "not slow and not container",
            *(["-x"] if first else []),
        ]
        files = dict.fromkeys(case.partition("::")[0] for case in cases)
        pytest.main([*words, *filter(os.path.exists, files)], plugins=[_Recorder(told, cases)])
        os._exit(0)
    end, last, since = time.monotonic() + seconds, "", time.monotonic()
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


def _job(mutants: Sequence[Generated], cases: _Cases, options: argparse.Namespace, folder: Path) -> None:
    """Tries mutants one after the other, in a copy of its own; a row for each."""
    copy, sound, odd = copy_of_checkout(folder), set[str](), set[str]()
    for mutant in mutants:
        file = copy / mutant.file
        whole = file.read_text()
        lines = whole.splitlines(keepends=True)
        lines[mutant.first - 1 : mutant.last] = [mutant.text]
        chosen, total = list[str](), 0.0
        of = cases.of(mutant)
        for case in of:
            total += cases.seconds[case] + 0.02
            if total > options.seconds:
                break
            chosen.append(case)
        file.write_text("".join(lines))
        try:
            failed, tried = (
                _run(chosen, copy, options.seconds * 2 + _HANG_S, options.first) if chosen else ([], 0)
            )
        finally:
            file.write_text(whole)
        if fresh := [case for case in failed if case not in sound | odd]:
            fails_anyway = set(_run(fresh, copy, len(fresh) * _HANG_S, False)[0])
            odd |= fails_anyway
            sound |= set(fresh) - fails_anyway
        saw = sorted({case.partition("[")[0] for case in failed if case in sound})
        row = Row(mutant.key, mutant.what, saw, tried, len(of))
        with options.out.open("a") as table:
            table.write(json.dumps(row._asdict()) + "\n")
        print(f"{mutant.file}: {mutant.what[:90]}: {len(saw)} of {tried} cases of {len(of)}", flush=True)


def main() -> int:
    """Adds the rows that the table lacks."""
    parser = argparse.ArgumentParser(prog="table", description=__doc__, allow_abbrev=False)
    parser.add_argument("--jobs", type=int, default=2, help="mutants at once")
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="of tests for each mutant, quick ones first"
    )
    parser.add_argument("--first", action="store_true", help="end at the first test that sees it")
    parser.add_argument("--only", default="", metavar="TEXT", help="mutants whose file or words contain this")
    parser.add_argument("--out", type=Path, default=TABLE, metavar="FILE.jsonl")
    options = parser.parse_args()
    options.out = options.out.absolute()
    known = read_table(options.out)
    cases = _Cases(DATABASE, _seconds(TIMES))
    left = [
        mutant
        for mutant in mutants_of(ROOT)
        if mutant.key not in known and options.only in f"{mutant.file} {mutant.what}"
    ]
    for name in _PRELOADED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="trainer-mutants-") as folder:
        jobs = list[int]()
        for number in range(options.jobs):
            if not (job := os.fork()):
                _job(left[number :: options.jobs], cases, options, Path(folder, str(number)))
                os._exit(0)
            jobs.append(job)
        bad = sum(os.waitpid(job, 0)[1] != 0 for job in jobs)
    rows = read_table(options.out).values()
    print(f"{len(rows)} mutants; {sum(not row.saw for row in rows)} that no fast test sees")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
