"""`make steady`: runs the fast suite again and again, quiet, beside busy processes and on one core; a table.

A test that fails once in twenty runs is a defect. What each run took and the slowest tests go into a page;
the runs are kept in a file beside, so that a page can be made of runs of several calls.
"""

import argparse
import contextlib
import datetime
import json
import platform
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
CONDITIONS = {
    "quiet": "two quiet cores",
    "busy": "beside two busy processes",
    "beside": "beside another run of the suite",
    "shared": "beside other work",
    "one core": "on one core (`taskset`)",
}
_TOP = """\
# How long the tests take, and whether they are steady

Whole runs of the fast suite (`make test`) by `make steady`, on {processor} with Python {python} and torch
{torch}. A run leaves three processes of pytest to two cores, two to one; a busy process computes without end.
`make mutants` breaks a copy of the package in known ways, and names for each the fast test that fails:
[mutants.md](mutants.md).

"""
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


def run_suite(condition: str, folder: Path, core: int) -> dict[str, Any]:
    """Runs it once; what came of it, with seconds by test."""
    report = folder / f"last-{core}.xml"
    words = [sys.executable, *_SUITE, f"--junitxml={report}"]
    if condition == "one core":
        words = ["taskset", "-c", str(core), *words]
    began = time.monotonic()
    with (folder / f"last-{core}.log").open("w") as log, _busy_processes(2 if condition == "busy" else 0):
        code = subprocess.run(words, cwd=ROOT, stdout=log, stderr=log, check=False).returncode
    seconds = time.monotonic() - began
    (suite,) = ElementTree.parse(report).getroot()
    tests: defaultdict[str, float] = defaultdict(float)
    failed = []
    for case in suite:
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        tests[name] += float(case.get("time", 0))
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
    count = {key: int(suite.get(key, 0)) for key in ("tests", "skipped", "failures", "errors")}
    passed = count["tests"] - count["skipped"] - count["failures"] - count["errors"]
    return {
        "condition": condition,
        "date": datetime.datetime.now().astimezone().date().isoformat(),
        "code": code,
        "seconds": round(seconds, 1),
        "passed": passed,
        "skipped": count["skipped"],
        "failed": failed,
        "slowest": dict(sorted(tests.items(), key=lambda item: -item[1])[:40]),
    }


def page(runs: list[dict[str, Any]]) -> str:
    """The page of these runs."""
    named = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    processor = named[1] if named else platform.machine()
    versions = {"python": platform.python_version(), "torch": metadata.version("torch")}
    lines = [_TOP.format(processor=processor, **versions)]
    lines += ["| # | conditions | date | passed | skipped | failed | time |", "|---|---|---|---|---|---|---|"]
    for number, run in enumerate(runs, 1):
        failed = ", ".join(f"`{name}`" for name in run["failed"]) or "0"
        minutes, seconds = divmod(round(run["seconds"]), 60)
        words = [CONDITIONS[run["condition"]], run["date"], run["passed"], run["skipped"], failed]
        lines.append(f"| {number} | {' | '.join(map(str, words))} | {minutes} min {seconds:02} s |")
    times = defaultdict(list)
    for run in runs:
        for name, seconds in run["slowest"].items():
            if run["condition"] == "quiet":
                times[name].append(seconds)
    slowest = sorted(((statistics.median(many), name) for name, many in times.items()), reverse=True)[:10]
    lines += [
        "",
        "The ten slowest tests, seconds of wall time (median of the quiet runs, three tests at a time):",
        "",
    ]
    lines += ["| seconds | test |", "|---|---|"]
    lines += [f"| {seconds:.1f} | `{name}` |" for seconds, name in slowest]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Runs and writes; 1 if a run failed."""
    parser = argparse.ArgumentParser(prog="steady", description=__doc__, allow_abbrev=False)
    for condition in CONDITIONS:
        parser.add_argument(f"--{condition.replace(' ', '-')}", type=int, default=0, metavar="RUNS")
    parser.add_argument("--core", type=int, default=0, help="for --one-core; two calls may have one each")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "steady.md", help="where the table goes")
    options = parser.parse_args()
    folder = ROOT / "build" / "steady"
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "runs.jsonl"
    for condition in CONDITIONS:
        for _ in range(getattr(options, condition.replace(" ", "_"))):
            run = run_suite(condition, folder, options.core)
            with kept.open("a") as file:
                file.write(json.dumps(run) + "\n")
            print(
                f"{condition}: {run['seconds']:.0f} s, {run['passed']} passed, failed: {run['failed']}",
                flush=True,
            )
    runs = [json.loads(line) for line in kept.read_text().splitlines()]
    options.out.write_text(page(runs))
    print(f"wrote {options.out}")
    return int(any(run["failed"] or run["code"] for run in runs))


if __name__ == "__main__":
    sys.exit(main())
