"""The result of `trainer check`, as a table and as JSON."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from trainer.commands.check.training import BATCH, STEPS, Subject
from trainer.commands.check.variants import VariantRow


@dataclass(frozen=True)
class Report:
    """The result of a check.

    Attributes:
        name: The recipe or task.
        about: Device, precision and sizes, in a line.
        rows: One for each variant: name, what, verdict, detail, tensor, step.
    """

    name: str
    about: str
    rows: tuple[VariantRow, ...]

    @property
    def ok(self) -> bool:
        """Returns True if no variant differs, other than as documented."""
        return not any(row.verdict == "differs" for row in self.rows)

    def __str__(self) -> str:
        """The table."""
        return "\n".join(report_lines(self))


def check_conditions(subject: Subject, draws: bool) -> str:
    """Describes the precision and the sizes of the check."""
    kind = "float64" if subject.double else f"float32 (in float64 {subject.why})"
    drawn = (
        "random numbers of the loss by the run's keys in both"
        if draws
        else "the loss draws no random numbers"
    )
    return f"{STEPS} steps of {BATCH} samples, {kind}, on the CPU, one thread; {drawn}"


def report_lines(report: Report) -> Iterator[str]:
    """Yields the lines of the table, and its summary."""
    yield f"{report.name}: the trainer against plain PyTorch; {report.about}"
    for row in report.rows:
        yield row_line(row)
    counts = {
        v: sum(row.verdict == v for row in report.rows)
        for v in ("equal", "documented", "differs", "not compared")
    }
    tally = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    yield f"  {tally}" + ("" if report.ok else "; what each verdict means: docs/check.md")


def row_line(row: VariantRow) -> str:
    """Formats a row of the table."""
    return f"  {row.name:<16} {row.verdict:<13} {row.what}: {row.detail}"


def report_json(report: Report) -> str:
    """Formats the whole report as JSON."""
    rows: Sequence[dict[str, object]] = [asdict(row) for row in report.rows]
    return json.dumps({"name": report.name, "about": report.about, "ok": report.ok, "rows": rows}, indent=2)
