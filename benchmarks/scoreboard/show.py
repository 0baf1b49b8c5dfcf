"""The scoreboard as Markdown and as JSON."""

import inspect
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.against import offering, titled
from benchmarks.scoreboard.benches import BENCHES
from benchmarks.scoreboard.figures import (
    Absent,
    Counted,
    Machine,
    Outcome,
    Part,
    Row,
    Timed,
    outcomes,
    verdict,
)
from trainer.observe.text import DASH, number, plain, share

_TIMED = "| trainer | against | trainer's | theirs | trainer's / theirs | 95 % interval | |"
_COUNTED = "| way | right | trainer on the same | |"
_LEAD = (
    "Every bench is measured against each library that it knows; one that isn't installed keeps its row. "
    "A time is compared round by round, the sides in turn; it is decided only if the whole 95 % interval of "
    "the ratio lies on one side of 1. What is counted is exact. A library that can be used in several ways "
    "has a row for each, but one outcome: that of its best way."
)
_REFUTE = """\
A library is used as its own documentation says, with the fastest settings that we know. Its loop is a
function of a few lines (below); what is the same for all sides, the trainer's too, stands in
`benchmarks/{overhead,loader,tokens,accumulation,resume}.py`, with the two loops by hand and nanoGPT's.
If you know better settings, change the function and run `python -m benchmarks scoreboard --only BENCH`,
or `python -m benchmarks BENCH --against LIBRARY` for that bench's own table. A time here is refuted if on a
quiet machine the interval lies on the other side of 1, a count if it differs at all."""
_WORDS: dict[Outcome, str] = {
    "trainer wins": "",  # too many to name
    "trainer loses": "The trainer loses",
    "equal": "Equal",
    "undecided": "Undecided",
}


def text(parts: Sequence[Part], machine: Machine) -> str:
    """Formats the results: conditions, who wins, a table for each bench, how to refute them."""
    blocks = [f"{machine.conditions}\n{machine.libraries}", _LEAD]
    busy = [part.name for part in parts if not part.quiet]
    if busy:
        blocks.append(
            f"**Other work ran beside {', '.join(busy)}: the times are a rough guide at most, and decide "
            "nothing.**"
        )
    blocks += ["## Who wins", summary(parts)]
    for part in parts:
        blocks += [f"## {BENCHES[part.name].title}", _part(part)]
    blocks += ["## How to refute it", refutation(parts)]
    return "\n\n".join(blocks)


def summary(parts: Sequence[Part]) -> str:
    """Summarizes the comparisons; names each that the trainer didn't win."""
    table = [f"| bench | {' | '.join(_WORDS)} |", "|---" * (1 + len(_WORDS)) + "|"]
    for part in parts:
        counts = " | ".join(str(len(outcomes([part], outcome))) for outcome in _WORDS)
        table.append(f"| {part.name} | {counts} |")
    decided = any(outcomes(parts, outcome) for outcome in _WORDS if outcome != "undecided")
    lines = [] if decided else ["- Nothing is decided here."]
    for outcome, word in _WORDS.items():
        found = outcomes(parts, outcome) if word else []
        named = "; ".join(f"{part.name} against {_short(row)}" for part, row in found)
        if found:
            lines.append(f"- **{word} {len(found)}:** {named}.")
        elif outcome == "trainer loses" and decided:
            lines.append("- The trainer loses nowhere here.")
    absent = [(part.name, row) for part in parts for row in part.rows if isinstance(row, Absent)]
    failed = [(part.name, part.failed) for part in parts if part.failed]
    failed += [(f"{name} against {row.against}", row.why) for name, row in absent if row.failed]
    lines += [f"- **Failed:** {what}: {plain(why)}." for what, why in failed]
    missing = [f"{name} against {row.against}" for name, row in absent if not row.failed]
    lines += [f"- Not measured: {'; '.join(missing)}."] if missing else []
    lines += [f"- Not measured: {part.name}: {plain(part.lacking)}." for part in parts if part.lacking]
    without = [name for name in BENCHES if name not in {part.name for part in parts}]
    lines += [f"- Left out by `--only`: {', '.join(without)}."] if without else []
    return "\n\n".join(["\n".join(table), "\n".join(lines)])


def refutation(parts: Sequence[Part]) -> str:
    """Names the code that stands for each library, and how to correct it."""
    rows = ["| bench | against | its loop | settings |", "|---|---|---|---|"]
    for part in parts:
        function = BENCHES[part.name].function
        for name, measure in offering(function).items() if function else ():
            settings = (inspect.getdoc(measure) or "").partition("\n")[0]
            loop = f"`{function}` in `benchmarks/against/{name}.py`"
            rows.append(f"| {part.name} | {name} | {loop} | {settings} |")
    return "\n\n".join([_REFUTE, "\n".join(rows)] if len(rows) > 2 else [_REFUTE])


def libraries(names: Mapping[str, bool]) -> str:
    """Lists the libraries in a line.

    Args:
        names: Whether each is installed.
    """
    return ", ".join(titled(name) if there else f"{name} not installed" for name, there in names.items())


def as_json(parts: Sequence[Part], machine: Machine, command: str) -> str:
    """Formats the whole result as JSON."""
    rows = [
        {**asdict(part), "quiet": part.quiet, "rows": [_as_dict(part, row) for row in part.rows]}
        for part in parts
    ]
    found = {"command": command, **asdict(machine), "benches": rows}
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def command_line(options: Mapping[str, Any]) -> str:
    """The command with those options that were given."""
    words = ["python", "-m", "benchmarks", "scoreboard"]
    for name, value in options.items():
        if value:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return shlex.join(words)


def _as_dict(part: Part, row: Row) -> dict[str, Any]:
    outcome, words = (None, row.why) if isinstance(row, Absent) else verdict(part, row)
    return {"kind": type(row).__name__.lower(), **asdict(row), "outcome": outcome, "verdict": words}


def _short(row: Timed | Counted) -> str:
    if isinstance(row, Counted):
        return f"{row.against} ({row.right} of {row.of}, the trainer {row.ours})"
    return f"{row.against} ({row.ours}: {row.ratio:.3f}, {row.low:.3f} to {row.high:.3f})"


def _part(part: Part) -> str:
    bench = BENCHES[part.name]
    if part.failed:
        return f"**Failed:** {plain(part.failed)}"
    if part.lacking:
        return f"Not measured: {plain(part.lacking)}"
    counted = any(isinstance(row, Counted) for row in part.rows)
    head = _COUNTED if counted else _TIMED
    rows = [head, "|---" * (head.count("|") - 1) + "|"]
    rows += [f"| {' | '.join(_cells(part, row, counted))} |" for row in part.rows]
    unit = bench.unit if counted else f"{bench.unit}, less is better"
    how = f"{part.conditions[:1].upper()}{part.conditions[1:]}"
    return f"Compared: {unit}. {how}. {bench.note}{_load(part)}\n\n" + "\n".join(rows)


def _load(part: Part) -> str:
    if not part.shares:
        return ""
    shares = " and ".join(share(one) for one in part.shares)
    return (
        f" Just before and just after, this process got {shares} of its CPUs when it wanted all of them; "
        "what ran in between isn't seen."
    )


def _cells(part: Part, row: Row, counted: bool) -> list[str]:
    if isinstance(row, Absent):
        why = plain(row.why).replace("|", "\\|")
        return [row.against, DASH, DASH, why] if counted else [DASH, row.against, *[DASH] * 4, why]
    if isinstance(row, Counted):
        ours = DASH if row.ours is None else f"{row.ours} of {row.of}"
        wrong = "**the trainer breaks its promise**" if row.broken else ""
        words = ". ".join(filter(None, (_marked(*verdict(part, row)), wrong, row.note)))
        return [row.against, f"{row.right} of {row.of}", ours, words]
    costs = [number(cost, 4) for cost in (row.our_cost, row.their_cost)]
    between = f"{row.low:.3f} to {row.high:.3f}"
    return [row.ours, row.against, *costs, f"{row.ratio:.3f}", between, _marked(*verdict(part, row))]


def _marked(outcome: Outcome | None, words: str) -> str:
    return f"**{words}**" if outcome == "trainer loses" else words
