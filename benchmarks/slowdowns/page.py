"""The page of results: conditions, what each run said, and the confusion matrix."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks.slowdowns.cases import Case
from benchmarks.slowdowns.held_out import HELD_OUT
from benchmarks.slowdowns.record import Record

# Promise P6 (issue 8).
_LEAST_NAMED = 48 / 50
_LEAST_HEALTHY = 20

_HEAD = """# Slowed on purpose: does the run say what slows it?

`make slowdowns` (`python -m benchmarks slowdowns`): trainings are slowed in known ways, most of them from
outside the trainer: signals, control groups, a slow network, slow system calls (LD_PRELOAD), servers that
answer late, other processes. Each case is a run of the real command line, `trainer train`, a few seconds
long. What counts is the last verdict that the run itself writes; its cause must be the one that was put in.
`share` is what the verdict says that it costs. A run in which other processes of the machine used over 0.3
CPUs says nothing about what was put into it: it is done again, whatever it said.

The rules were frozen at commit 7f60266; the cases marked † were written after that.
"""


class Result(NamedTuple):
    """Result of a case.

    Attributes:
        case: Which.
        kept: What the run said and why; None if it failed or said nothing.
        error: Its last line if it failed.
    """

    case: Case
    kept: Record | None
    error: str = ""

    def of_run(self, name: str) -> float:
        """A figure of `Record.run`."""
        return self.kept.run.get(name, 0.0) if self.kept is not None else 0.0

    @property
    def named(self) -> str:
        """The cause of the last verdict."""
        return self.kept.said["cause"] if self.kept is not None else "(no verdict)"

    @property
    def share(self) -> float:
        """Returns the cost in its verdict."""
        return float(self.kept.said["share"]) if self.kept is not None else 0.0

    @property
    def right(self) -> bool:
        """Whether the cause is the one that was put in."""
        return self.kept is not None and self.kept.named(self.named)

    @property
    def line(self) -> str:
        """For people."""
        what = "ok" if self.right else "WRONG"
        text = self.error or (self.kept.said["text"] if self.kept is not None else "")
        return (
            f"{what:5} {self.case.name}: {self.case.cause} -> {self.named} {self.share:.2f}, "
            f"{self.of_run('samples_per_s'):,.0f}/s, {self.of_run('seconds'):.0f} s, "
            f"others {self.of_run('others'):.2f} CPUs, attempt {self.of_run('attempt'):.0f}: {text}"
        )


def page(results: Sequence[Result], replayed: Sequence[Record], conditions: str) -> tuple[str, bool]:
    """The page, and whether the promise is kept."""
    injected = [result for result in results if result.case.cause != "none"]
    healthy = [result for result in results if result.case.cause == "none"]
    held_out = {case.name for case in HELD_OUT}
    first = [result for result in injected if result.case.name not in held_out]
    last = [result for result in injected if result.case.name in held_out]
    right, quiet = sum(r.right for r in injected), sum(r.right for r in healthy)
    causes, recipes = {r.case.cause for r in injected}, {r.case.recipe for r in injected}
    again = [(record, record.judged_again()) for record in replayed]
    hits = sum(record.named(verdict.cause) for record, verdict in again)
    lines = [
        _HEAD,
        conditions + ":\n",
        "```",
        f"{right} of {len(injected)} injected slowdowns named rightly ({len(causes)} causes, "
        f"{len(recipes)} recipes)",
        f"  {_hits(first)} of those written before the rules were frozen",
        f"  {_hits(last)} of those written after that",
        f"{quiet} of {len(healthy)} healthy runs without a verdict",
        f"{hits} of {len(again)} made-up timings of a machine with a GPU named rightly (no run)",
        "```\n",
        "## Injected\n",
        *_table(injected, held_out),
        "\n† written after the rules were frozen (commit 7f60266).\n",
        "## Healthy\n",
        *_table(healthy, held_out),
        "\n## Confusion matrix\n",
        "Rows: what was put in; columns: what was named. Real runs only.\n",
        *_matrix(results),
        "\n## Made-up timings of a machine with a GPU\n",
        "No GPU was at hand: these are no measurements. Figures as such a machine would give them, written",
        "by hand (`benchmarks/slowdowns/gpu.py`) and given to the rules.\n",
        "| case | cause | named | share |",
        "|---|---|---|---|",
        *(_replayed(record, verdict.cause, verdict.share) for record, verdict in again),
        "",
    ]
    wrong = [r for r in results if not r.right]
    if wrong:
        lines += ["## Wrong verdicts, in their words\n"]
        lines += [f"- {r.case.name} ({r.case.cause}): {r.error or _said(r)}" for r in wrong] + [""]
    enough = len(injected) >= 50 and right >= _LEAST_NAMED * len(injected)
    return "\n".join(lines), enough and quiet == len(healthy) >= _LEAST_HEALTHY


def _said(result: Result) -> str:
    return str(result.kept.said["text"]) if result.kept is not None else "said nothing"


def _hits(results: Sequence[Result]) -> str:
    return f"{sum(r.right for r in results)} of {len(results)}"


def _replayed(record: Record, cause: str, share: float) -> str:
    return f"| {record.name} | {record.cause} | {_mark(cause, record.named(cause))} | {share:.2f} |"


def _mark(cause: str, right: bool) -> str:
    return cause if right else f"**{cause}**"


def _table(results: Iterable[Result], held_out: set[str]) -> list[str]:
    lines = [
        "| case | recipe | ranks | what is slow | cause | named | share | samples/s | others |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        case = result.case
        cause = "/".join((case.cause, *case.also))
        mark = " †" if case.name in held_out else ""
        named, speed = _mark(result.named, result.right), result.of_run("samples_per_s")
        lines.append(
            f"| {case.name}{mark} | {case.recipe} | {case.ranks} | {case.how} | {cause} | {named} | "
            f"{result.share:.2f} | {speed:,.0f} | {result.of_run('others'):.1f} |"
        )
    return lines


def _matrix(results: Sequence[Result]) -> list[str]:
    counts = Counter((r.case.cause, r.named) for r in results)
    rows = sorted({cause for cause, _ in counts}, key=lambda cause: (cause == "none", cause))
    columns = rows + sorted({named for _, named in counts} - set(rows))
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for cause in rows:
        cells = (str(counts[cause, named] or "") for named in columns)
        lines.append(f"| {cause} | " + " | ".join(cells) + " |")
    return lines
