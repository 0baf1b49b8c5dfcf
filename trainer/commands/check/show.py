"""What `trainer check` found, as a table and as JSON."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from trainer.commands.check.training import BATCH, STEPS, Subject
from trainer.commands.check.variants import Row


@dataclass(frozen=True)
class Report:
    """What a check found.

    Attributes:
        name: Of what was checked.
        about: How it was computed, in a line.
        rows: One for each thing that was changed: name, what, verdict, detail, tensor, step.
    """

    name: str
    about: str
    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing differs but what the documentation says."""
        return not any(row.verdict == "differs" for row in self.rows)

    def __str__(self) -> str:
        """The table."""
        return "\n".join(lines(self))


def about(subject: Subject, draws: bool) -> str:
    """How it was computed."""
    kind = "float64" if subject.double else f"float32 (in float64 {subject.why})"
    drawn = (
        "random numbers of the loss by the run's keys in both"
        if draws
        else "the loss draws no random numbers"
    )
    return f"{STEPS} steps of {BATCH} samples, {kind}, on the CPU, one thread; {drawn}"


def lines(report: Report) -> Iterator[str]:
    """The table, and what it comes to."""
    yield f"{report.name}: the trainer against plain PyTorch; {report.about}"
    for row in report.rows:
        yield line(row)
    counts = {
        v: sum(row.verdict == v for row in report.rows)
        for v in ("equal", "documented", "differs", "not compared")
    }
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    yield f"  {told}" + ("" if report.ok else "; what each verdict means: docs/check.md")


def line(row: Row) -> str:
    """One of the table."""
    return f"  {row.name:<16} {row.verdict:<13} {row.what}: {row.detail}"


def as_json(report: Report) -> str:
    """All of it."""
    rows: Sequence[dict[str, object]] = [asdict(row) for row in report.rows]
    return json.dumps({"name": report.name, "about": report.about, "ok": report.ok, "rows": rows}, indent=2)
