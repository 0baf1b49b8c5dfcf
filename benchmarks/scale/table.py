"""The table of `python -m benchmarks scale`, its advice, and where its figures come from."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from benchmarks.scale import formulas
from benchmarks.scale.figures import Estimate, Figures, Job, difference
from trainer.observe.text import count, duration, number, scaled, size

TARGET = 0.10  # as far as formula and simulation may lie apart


def percent(value: float) -> str:
    """A share with three digits, however small: time lost is told apart from none."""
    return f"{number(100 * value, 3)} %"


class _Row(NamedTuple):
    name: str
    label: str
    written: Callable[[float], str]


ROWS = (
    _Row("step_s", "a step", duration),
    _Row("exposed_s", "of it, waiting for gradients", duration),
    _Row("stall_s", "a checkpoint stops the training for", duration),
    _Row("mtbf_s", "a failure every", duration),
    _Row("interval_s", "least is lost with a checkpoint every", duration),
    _Row("lost_share", "time lost: checkpoints, work again, restarts", percent),
    _Row("lost_by_default", "the same at checkpoint.minutes=10, the default", percent),
    _Row("restart_s", "from a failure to training again", duration),
    _Row("rendezvous_s", "of it, rank 0's store answers for", duration),
    _Row("store_requests", "requests to it", count),
    _Row("sockets_per_node", "connections that a node holds for gloo", count),
    _Row("goodput", "goodput: time spent on what is kept", percent),
    _Row("log_bytes_per_day", "rows of metrics a day", size),
    _Row("data_bytes_per_s", "read from storage", lambda value: scaled(value, "B/s")),
    _Row("loader_cpus_per_gpu", "CPUs of a GPU's loader", lambda value: number(value, 3)),
)


def differences(estimates: Sequence[Estimate], simulated: Sequence[Estimate]) -> dict[str, float]:
    """Returns the largest relative difference of formula and simulation, by figure."""
    return {
        row.name: max(
            difference(getattr(one, row.name), getattr(other, row.name))
            for one, other in zip(estimates, simulated, strict=True)
        )
        for row in ROWS
    }


def table(gpus: Sequence[int], estimates: Sequence[Estimate], simulated: Sequence[Estimate] = ()) -> str:
    """Markdown: a row for each figure, a column for each number of GPUs; "formula / simulation"."""
    heads = [f"{one:,} GPU{'s' * (one != 1)}" for one in gpus]
    apart = differences(estimates, simulated) if simulated else {}
    lines = [_line(["", *heads, *["apart by at most"] * bool(apart)])]
    lines.append("|" + "---|" * (len(heads) + 1 + bool(apart)))
    for row in ROWS:
        cells = [row.written(getattr(one, row.name)) for one in estimates]
        if simulated:
            cells = [
                f"{cell} / {row.written(getattr(one, row.name))}"
                for cell, one in zip(cells, simulated, strict=True)
            ]
            cells.append(f"{100 * apart[row.name]:.1f} %")
        lines.append(_line([row.label, *cells]))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("\u00a0", " ").replace("|  |", "| |")


def advice(figures: Figures, gpus: Sequence[int]) -> str:
    """Returns advice on settings, in one line."""
    told = []
    for one in gpus:
        every, step = formulas.steps_between(figures, one), formulas.step_s(figures, one)
        told.append(f"checkpoint.every={every} on {one:,} ({duration(every * step)})")
    return f"advice: checkpoint.minutes=0 and {', '.join(told)}".replace("\u00a0", " ")


def sources(job: Job) -> str:
    """Markdown: each figure and where it comes from."""
    lines = ["| figure | value | from |", "|---|---|---|"]
    for name, value in job.figures:
        shown = ", ".join(f"{one:.6g}" for one in value) if isinstance(value, tuple) else f"{value:.6g}"
        lines.append(f"| `{name}` | {shown} | {job.sources[name].replace('|', '/')} |")
    return "\n".join(lines)


def not_measured(found: Mapping[str, str]) -> str:
    """A line that says which figures nobody measured here; "" if all were."""
    names = [name for name, source in found.items() if source.startswith(("assumed:", "given:"))]
    return f"not measured here: {', '.join(names)}" if names else ""
