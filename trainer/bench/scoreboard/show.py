"""The scoreboard as Markdown and as JSON."""

import inspect
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trainer.bench.against import offering, titled
from trainer.bench.scoreboard.benches import BENCHES
from trainer.bench.scoreboard.figures import (
    Absent,
    Counted,
    Machine,
    Outcome,
    Part,
    Row,
    Timed,
    outcomes,
)
from trainer.report.text import DASH, duration, number, share

_TIMED = "| trainer | against | trainer's | theirs | trainer's / theirs | 95 % interval | |"
_COUNTED = "| way | right | trainer on the same | |"
_LEAD = """\
Every bench is measured against each library that it knows; one that isn't installed keeps its row. A time is compared
round by round, the sides in turn; it is decided only if the whole 95 % interval of the ratio lies on one side of 1. What
is counted is exact."""


def document(parts: Sequence[Part], machine: Machine, command: str, stem: str) -> str:
    """The whole page.

    Args:
        parts: What was measured.
        machine: Where.
        command: That repeats it.
        stem: Name of the plot and of the figures, which lie beside it.
    """
    took = duration(sum(part.seconds for part in parts))
    head = [
        "# Scoreboard",
        f"Written by `{command}` in {took}. {_LEAD}",
        f"![ratios and counts]({stem}.svg)",
        f"[All raw figures]({stem}.json)",
    ]
    return "\n\n".join([*head, text(parts, machine), "## How to refute it", refutation(parts)]) + "\n"


def text(parts: Sequence[Part], machine: Machine) -> str:
    """What was found, without what surrounds it in a file."""
    shares = " and ".join(share(one) for one in machine.shares)
    load = f"Before and after, this process got {shares} of its CPUs when it wanted all of them"
    quiet = (
        f"{load}." if machine.quiet else f"**{load}: other work ran beside it. The times are a rough guide.**"
    )
    blocks = [f"{machine.conditions}\n{machine.libraries}", quiet, "## Who wins", summary(parts)]
    for part in parts:
        blocks += [f"## {BENCHES[part.name].title}", _part(part)]
    return "\n\n".join(blocks)


def summary(parts: Sequence[Part]) -> str:
    """How the comparisons ended; what the trainer didn't win is named one by one."""
    lines = [f"- The trainer wins {len(outcomes(parts, 'trainer wins'))} of {_compared(parts)} comparisons."]
    words: dict[Outcome, str] = {
        "trainer loses": "**It loses",
        "equal": "Equal",
        "undecided": "Undecided",
    }
    for outcome, word in words.items():
        found = outcomes(parts, outcome)
        named = "; ".join(f"{part.name} against {_short(row)}" for part, row in found)
        end = "**" if word.startswith("**") else ""
        lines.append(f"- {word} {len(found)}{end}{f': {named}' if found else ''}.")
    failed = [f"{part.name}: {part.failed}" for part in parts if part.failed]
    failed += [
        f"{part.name} against {r.against}: {r.why}" for part in parts for r in _absent(part) if r.failed
    ]
    lines += [f"- **Failed:** {one}" for one in failed]
    missing = [f"{part.name} against {r.against}" for part in parts for r in _absent(part) if not r.failed]
    return "\n".join([*lines, *([f"- Not measured: {'; '.join(missing)}."] if missing else [])])


def refutation(parts: Sequence[Part]) -> str:
    """Which code stands for each library, and what to do with it."""
    rows = ["| bench | against | its loop | settings |", "|---|---|---|---|"]
    for part in parts:
        function = BENCHES[part.name].function
        for name, measure in offering(function).items() if function else ():
            settings = (inspect.getdoc(measure) or "").partition("\n")[0]
            rows.append(
                f"| {part.name} | {name} | `trainer/bench/against/{name}.py`, `{function}` | {settings} |"
            )
    return (
        "A library is used as its own documentation says, with the fastest settings that we know. If you know better, "
        "its loop is a function of a few lines that you can read and change; what is the same for all sides, the "
        "trainer's too, is `trainer/bench/{overhead,loader,tokens,accumulation,resume}.py`. Change it, then run "
        "`trainer bench scoreboard --only BENCH`, or the bench alone with its own table: `trainer bench BENCH --against "
        "LIBRARY`. A claim is refuted if the interval of the ratio lies on the other side of 1 on a quiet machine, or "
        "if a count differs at all. nanoGPT's loop and the two by hand, which aren't libraries', stand in the files of "
        "their benches.\n\n" + "\n".join(rows)
    )


def libraries(names: Mapping[str, bool]) -> str:
    """All of them in a line.

    Args:
        names: Whether each is installed.
    """
    return ", ".join(titled(name) if there else f"{name} not installed" for name, there in names.items())


def as_json(parts: Sequence[Part], machine: Machine, command: str) -> str:
    """All of it, for programs."""
    rows = [{**asdict(part), "rows": [_as_dict(row) for row in part.rows]} for part in parts]
    found = {"command": command, **asdict(machine), "quiet": machine.quiet, "benches": rows}
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def command_line(options: Mapping[str, Any]) -> str:
    """The command with those options that were given."""
    words = ["trainer", "bench", "scoreboard"]
    for name, value in options.items():
        if value:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return shlex.join(words)


def _as_dict(row: Row) -> dict[str, Any]:
    outcome = None if isinstance(row, Absent) else row.outcome
    return {"kind": type(row).__name__.lower(), **asdict(row), "outcome": outcome}


def _compared(parts: Sequence[Part]) -> int:
    return sum(not isinstance(row, Absent) and row.outcome is not None for part in parts for row in part.rows)


def _absent(part: Part) -> list[Absent]:
    return [row for row in part.rows if isinstance(row, Absent)]


def _short(row: Timed | Counted) -> str:
    if isinstance(row, Counted):
        return f"{row.against} ({row.right} of {row.of}, the trainer {row.ours})"
    return f"{row.against} ({row.ours}: {row.ratio:.3f}, {row.low:.3f} to {row.high:.3f})"


def _part(part: Part) -> str:
    bench = BENCHES[part.name]
    if part.failed:
        return f"**Failed:** {part.failed}"
    counted = any(isinstance(row, Counted) for row in part.rows)
    head = _COUNTED if counted else _TIMED
    rows = [head, "|---" * (head.count("|") - 1) + "|"]
    rows += [f"| {' | '.join(_cells(row, counted))} |" for row in part.rows]
    about = (
        f"{bench.unit[0].upper()}{bench.unit[1:]}{'' if counted else '; less is better'}. {part.conditions}."
    )
    return f"{about}\n\n" + "\n".join(rows)


def _cells(row: Row, counted: bool) -> list[str]:
    if isinstance(row, Absent):
        return [row.against, DASH, DASH, row.why] if counted else [DASH, row.against, *[DASH] * 4, row.why]
    if isinstance(row, Counted):
        ours = DASH if row.ours is None else f"{row.ours} of {row.of}"
        outcome = ". ".join(filter(None, (row.outcome and _marked(row.outcome), row.note)))
        return [row.against, f"{row.right} of {row.of}", ours, outcome]
    costs = [number(cost, 4) for cost in (row.our_cost, row.their_cost)]
    between = f"{row.low:.3f} to {row.high:.3f}"
    return [row.ours, row.against, *costs, f"{row.ratio:.3f}", between, _marked(row.outcome)]


def _marked(outcome: Outcome) -> str:
    return f"**{outcome}**" if outcome == "trainer loses" else outcome
