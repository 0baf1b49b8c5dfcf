"""`make mutant-table`: for each mutant, all fast tests that see it, in a file that goes on where it stopped.

A mutant is tried on the tests that ran its lines, by a coverage database with a context for each test.
"""

import argparse
import json
import re
import sqlite3
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from coverage.numbits import numbits_to_nums

from tests.mutants.__main__ import HERE, read_mutants
from tests.mutants.generated import Generated, generate
from tests.mutants.runner import ROOT, Copy, in_jobs

TABLE = HERE / "table.jsonl"
DATABASE, TIMES = ROOT / "build/mutants/coverage.db", ROOT / "build/mutants/times.xml"


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
        found = {_alone(case.rpartition("|")[2]) for case, bits in rows if lines & set(numbits_to_nums(bits))}
        found &= self.seconds.keys()
        return sorted(found, key=lambda case: self.seconds[case])


def read_table(file: Path) -> dict[str, Row]:
    """Rows by key; not those whose tests have all gone."""
    if not file.exists():
        return {}
    rows = (Row(**json.loads(line)) for line in file.read_text().splitlines())
    return {row.key: row for row in rows if not row.saw or any(map(_stands, row.saw))}


def _stands(test: str) -> bool:
    file, _, name = test.partition("::")
    return (ROOT / file).exists() and f"def {name}(" in (ROOT / file).read_text()


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


def _alone(case: str) -> str:
    """The name of a case without that of its group, which xdist appends."""
    return re.sub(r"@[^@\]]*$", "", case)


def _seconds(file: Path) -> dict[str, float]:
    seconds = dict[str, float]()
    for case in ElementTree.parse(file).iter("testcase"):
        if case.find("skipped") is None and case.find("failure") is None and case.find("error") is None:
            name = f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"
            seconds[_alone(name)] = float(case.attrib["time"])
    return seconds


def _job(mutants: Sequence[Generated], cases: _Cases, options: argparse.Namespace, copy: Copy) -> int:
    """Tries mutants one after the other; a row for each."""
    for mutant in mutants:
        lines = (copy.folder / mutant.file).read_text().splitlines(keepends=True)
        lines[mutant.first - 1 : mutant.last] = [mutant.text]
        chosen, total, of = list[str](), 0.0, cases.of(mutant)
        for case in of:
            total += cases.seconds[case] + 0.02
            if total > options.seconds:
                break
            chosen.append(case)
        # To import all test files takes longer than most tests: those of the mutant's room see it first.
        room = f"tests/{Path(mutant.file).parts[1]}/"
        near = [case for case in chosen if case.startswith(room)] if options.first else []
        saw, began = set[str](), 0
        for some in (near, [case for case in chosen if case not in near]):
            if some and not (options.first and saw):
                tried = copy.try_mutant(mutant.file, "".join(lines), some, options.seconds * 2, options.first)
                saw |= {case.partition("[")[0] for case in tried.saw}
                began += tried.began
        row = Row(mutant.key, mutant.what, sorted(saw), began, len(of))
        with options.out.open("a") as table:
            table.write(json.dumps(row._asdict()) + "\n")
        print(f"{mutant.file}: {mutant.what[:90]}: {len(saw)} of {began} cases of {len(of)}", flush=True)
    return 0


def main() -> int:
    """Adds the rows that the table lacks."""
    parser = argparse.ArgumentParser(prog="table", description=__doc__, allow_abbrev=False)
    parser.add_argument("--jobs", type=int, default=2, help="mutants at once")
    parser.add_argument("--seconds", type=float, default=300.0, help="of tests for each, quick ones first")
    parser.add_argument("--first", action="store_true", help="end at the first test that sees it")
    parser.add_argument("--only", default="", metavar="TEXT", help="mutants whose file or words contain this")
    parser.add_argument("--out", type=Path, default=TABLE, metavar="FILE.jsonl")
    options = parser.parse_args()
    options.out = options.out.absolute()
    known = read_table(options.out)
    cases = _Cases(DATABASE, _seconds(TIMES))
    fresh = [mutant for mutant in mutants_of(ROOT) if mutant.key not in known]
    left = [mutant for mutant in fresh if options.only in f"{mutant.file} {mutant.what}"]
    bad = in_jobs(left, options.jobs, lambda mutants, copy: _job(mutants, cases, options, copy))
    rows = read_table(options.out).values()
    print(f"{len(rows)} mutants; {sum(not row.saw for row in rows)} that no fast test sees")
    return int(bad != 0)


if __name__ == "__main__":
    sys.exit(main())
