"""The table of `python -m benchmarks scale`, its advice, and where its figures come from."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from benchmarks.scale import formulas
from benchmarks.scale.figures import Figures, Job
from trainer.observe.text import count, duration, number, scaled, size


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


def table(gpus: Sequence[int], estimates: Sequence[Mapping[str, float]]) -> str:
    """Formats a table in Markdown: a row for each figure, a column for each number of GPUs."""
    lines = [_line(["", *(f"{one:,} GPU{'s' * (one != 1)}" for one in gpus)])]
    lines.append("|" + "---|" * (len(gpus) + 1))
    lines += [_line([row.label, *(row.written(one[row.name]) for one in estimates)]) for row in ROWS]
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
