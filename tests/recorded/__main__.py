"""`python -m tests.recorded`: plays the recorded recipes and compares with the record, `recipes.json`.

The record holds 60 random recipes with weights, losses, evaluations, order of samples and exit codes, and 40
refusals. `--write` records. With other processor flags, another torch, Python or number of threads, weights
and losses may be other ones. There only order, exit codes and names are compared; `--anew` first records the
same recipes from the recorded commit, in a git worktree with this environment, and compares with that.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.recorded.draw import Attempt, Case, draw
from tests.recorded.files import left_out
from tests.recorded.play import Workplace, play_all
from tests.recorded.refusals import refuse

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).parent / "recipes.json"
SEEDS = range(60)  # every third has one micro-batch a step
_THREADS = 1
_ANYWHERE = ("codes", "order")  # what a recipe gives on any machine


def main() -> int:
    """Returns 1 if something differs from the record, or isn't right."""
    parser = argparse.ArgumentParser(prog="recorded", description=__doc__, allow_abbrev=False)
    parser.add_argument("--write", action="store_true", help="record, in place of comparing")
    parser.add_argument("--anew", action="store_true", help="record from the recorded commit, then compare")
    parser.add_argument("--only", type=int, metavar="SEED", help="one recipe, without the refusals")
    parser.add_argument("--first", type=int, metavar="N", help="the first N recipes, and the refusals")
    parser.add_argument("--file", type=Path, default=RECORD, metavar="JSON", help="the record")
    parser.add_argument("--cases", type=Path, metavar="JSON", help="a record whose recipes are played")
    options = parser.parse_args()
    if options.write:
        return _write(options.file, options.cases, options.only)
    record = json.loads(options.file.read_text())
    if options.anew:
        record = _recorded_anew(record, options.file, options.only)
    return _compare(record, options.only, options.first)


def machine() -> dict[str, Any]:
    """Returns what decides the bits of a run on a CPU: processor flags, threads, torch, Python."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    here = {"torch": str(torch.__version__), "python": platform.python_version(), "threads": _THREADS}
    here["capability"] = torch.backends.cpu.get_cpu_capability()
    return {**here, "flags": " ".join(sorted(flags.partition(":")[2].split()))}


def _write(file: Path, cases_of: Path | None, only: int | None) -> int:
    cases = [draw(seed) for seed in SEEDS] if cases_of is None else _cases(json.loads(cases_of.read_text()))
    cases = [case for case in cases if only in (None, case.seed)]
    recipes: dict[str, Any] = {}
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="trainer-recorded-") as folder:
        place = Workplace(Path(folder).resolve())
        for case, played in play_all(cases, place):
            wrong += isinstance(played, str)
            told = f"WRONG: {played}" if isinstance(played, str) else ""
            print(f"{case.seed}: {case.kind} {told}", flush=True)
            recipes[str(case.seed)] = played
        refusals = refuse(place) if only is None else {}
    for words, one in refusals.items():
        if one["code"] != 2 or one["left"]:
            print(f"refusal {words}: {one}")
    if wrong:
        print(f"{wrong} of {len(cases)} recipes aren't right: nothing is recorded")
        return 1
    record = {"commit": _commit(), "machine": machine(), "recipes": recipes, "refusals": refusals}
    file.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    print(f"{len(recipes)} recipes and {len(refusals)} refusals of commit {record['commit']}: {file}")
    return 0


def _cases(record: Mapping[str, Any]) -> list[Case]:
    cases = [Case(**one["case"]) for one in record["recipes"].values()]
    cases = [case._replace(attempts=[Attempt(*one) for one in case.attempts]) for case in cases]
    return sorted(cases, key=lambda case: case.seed)


def _commit() -> str:
    """Returns the commit of the checkout; with + behind it if files that are tracked were changed."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def _recorded_anew(record: Mapping[str, Any], file: Path, only: int | None) -> dict[str, Any]:
    """Records the same recipes from the recorded commit, in a worktree, with this environment's packages."""
    commit, anew = str(record["commit"]).rstrip("+"), ROOT / "build" / "recorded" / "anew.json"
    tree = anew.parent / commit
    anew.parent.mkdir(parents=True, exist_ok=True)
    if not tree.exists():
        words = ["git", "-C", str(ROOT), "worktree", "add", "--detach", str(tree), commit]
        subprocess.run(words, check=True)
    words = [sys.executable, "-m", "tests.recorded", "--write", "--file", str(anew)]
    words += ["--cases", str(file.resolve())]
    words += [] if only is None else ["--only", str(only)]
    subprocess.run(words, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, check=True)
    return dict(json.loads(anew.read_text()))


def _compare(record: Mapping[str, Any], only: int | None, first: int | None) -> int:
    here = machine()
    then = record["machine"]
    other = [f"{key}: {then[key]}, here {here[key]}" for key in here if then[key] != here[key]]
    if other:
        print(f"recorded on another machine: record anew from commit {record['commit']} by --anew")
        print(*(f"  {line[:160]}" for line in other), sep="\n")
        print(f"compared are only {', '.join(_ANYWHERE)}, exit codes and names of refusals")
    differ = 0
    with tempfile.TemporaryDirectory(prefix="trainer-recorded-") as folder:
        place = Workplace(Path(folder).resolve())
        cases = [one for one in _cases(record) if only in (None, one.seed) and not left_out(one.kind)][:first]
        for case, found in play_all(cases, place):
            wanted = record["recipes"][str(case.seed)]
            texts = case.kind == "documents" and then["python"] != here["python"]  # of this Python
            keys = ("codes",) if texts else _ANYWHERE
            some = keys if other else None
            lines = [found] if isinstance(found, str) else [*differences(wanted, found, some)]
            differ += bool(lines)
            print(f"{case.seed}: {case.kind} {'differs' if lines else 'same'}", flush=True)
            print(*(f"  {line}" for line in lines[:8]), sep="\n", end="\n" if lines else "")
        lines = [*differences(record["refusals"], refuse(place))] if only is None else []
    print(*(f"refusal {line}" for line in lines), sep="\n", end="\n" if lines else "")
    print(f"{len(cases)} recipes: {differ} differ; {len(record['refusals'])} refusals: {len(lines)} differ")
    return 1 if differ or lines else 0


def differences(wanted: Any, found: Any, keys: tuple[str, ...] | None = None, at: str = "") -> Iterator[str]:
    """Yields where two pieces of JSON differ: the path from `at` on, both values, and of numbers by how much.

    `keys` are those of the first level that are compared; None: all.
    """
    if isinstance(wanted, dict) and isinstance(found, dict):
        for key in keys or sorted({*wanted, *found}):
            one, other = wanted.get(key, "absent"), found.get(key, "absent")
            yield from differences(one, other, None, f"{at}.{key}".strip("."))
    elif isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        for number, (one, other) in enumerate(zip(wanted, found, strict=True)):
            yield from differences(one, other, None, f"{at}[{number}]")
    elif wanted != found:
        numbers = isinstance(wanted, float) and isinstance(found, float) and wanted != 0
        by = f" (by {found / wanted - 1:+.2g})" if numbers else ""
        yield f"{at}: {wanted}, now {found}{by}"


if __name__ == "__main__":
    raise SystemExit(main())
