"""`make steady`: runs the fast suite, or `.ci/run`, again and again; a row of each in tests/steady.jsonl.

A test that fails once in twenty runs is a defect. Conditions: two quiet cores, beside two processes that
compute without end, on one core; `.ci/run` runs in a clean clone.
"""

import argparse
import contextlib
import datetime
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
CONDITIONS = ("quiet", "busy", "one-core", "ci")
_SUITE = ["-m", "pytest", "-n", "auto", "--dist", "loadgroup", "-m", "not slow and not container"]


@contextlib.contextmanager
def _busy_processes(count: int) -> Iterator[None]:
    """Processes that compute without end."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def _failed(report: Path) -> list[str]:
    """Cases of a report that failed."""
    cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    return [f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}" for case in bad]


def run_once(condition: str, folder: Path) -> dict[str, Any]:
    """Runs the suite, or `.ci/run`, under a condition; its log stays in `folder`, under its time."""
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True)
    report, where = folder / "last.xml", ROOT
    words = [sys.executable, *_SUITE, f"--junitxml={report}"]
    report.unlink(missing_ok=True)
    if condition == "one-core":
        words = ["taskset", "-c", "0", *words]
    with tempfile.TemporaryDirectory() as clone:
        if condition == "ci":
            subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
            words, where = ["bash", ".ci/run"], Path(clone)
        began = time.monotonic()
        with (
            (folder / f"{int(time.time())}.log").open("w") as log,
            _busy_processes(2 if condition == "busy" else 0),
        ):
            code = subprocess.run(words, cwd=where, stdout=log, stderr=log, check=False).returncode
    row = {"commit": commit.strip(), "date": datetime.date.today().isoformat(), "condition": condition}
    return {**row, "code": code, "seconds": round(time.monotonic() - began), "failed": _failed(report)}


def main() -> int:
    """Runs, and adds the rows; 1 if a run failed."""
    parser = argparse.ArgumentParser(prog="steady", description=__doc__, allow_abbrev=False)
    for condition in CONDITIONS:
        parser.add_argument(f"--{condition}", type=int, default=0, metavar="RUNS")
    options = vars(parser.parse_args())
    folder = ROOT / "build" / "steady"
    folder.mkdir(parents=True, exist_ok=True)
    bad = False
    for condition in CONDITIONS:
        for _ in range(options[condition.replace("-", "_")]):
            row = run_once(condition, folder)
            print(json.dumps(row), flush=True)
            with (ROOT / "tests" / "steady.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            bad |= row["code"] != 0
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
