"""Figures of a whole run, each as a number and as text; None where the run doesn't have it."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TypeGuard

from trainer.observe.charts.axis import AxisKind as Scale
from trainer.observe.charts.thin import Cell, Point, joined
from trainer.observe.text import count, duration, number, plain, scaled, share, size
from trainer.runs.manifest import planned_steps
from trainer.runs.report.phases import PHASES_EXPLAINED
from trainer.runs.report.read import RecordedRun

_SET_PARTS = 3  # eval/NAME/metric
_ROUNDING = 1e-6  # of a mean over many samples
# The field's words for metrics whose names in records are not those.
_TITLES = {"map": "mAP", "map_50": "mAP@50", "map_75": "mAP@75", "top5": "Top-5 accuracy"}
_WORSE = ("loss", "error", "perplexity", "wer", "cer", "bits", "rmse", "mae", "mse")


class Figure(NamedTuple):
    """Figure of a run.

    Attributes:
        value: The number, for comparisons.
        text: The number as it is displayed.
        note: A note to display below it.
    """

    value: float
    text: str
    note: str = ""


class KeyFigure(NamedTuple):
    """Kind of figure: its name, the function that finds it, and 1 if more is better, -1 if less, else 0."""

    name: str
    of: Callable[[RecordedRun], Figure | None]
    better: int = 0


def is_number(value: Any) -> TypeGuard[float]:
    """True if a JSON value is a number that can be displayed."""
    return type(value) in (int, float) and -1e200 < value < 1e200


def over_rows(points: Iterable[Point], name: str) -> Cell | None:
    """Merges a figure over all records."""
    return joined(cell for point in points if (cell := point.cells.get(name)) and cell.rows)


def end_step(run: RecordedRun) -> int:
    """Returns the last step of the records or of the end; at least 1."""
    ends = [points[-1].step for points in (run.train, run.evaluation) if points]
    if not ends and (planned := planned_steps(run.manifest)) is not None:
        ends = [planned]
    return max([1, *(end for end in ends if end < 10**15)])


def metrics(run: RecordedRun) -> list[str]:
    """Returns the names of the evaluations' metrics other than the loss."""
    names = dict.fromkeys(name for point in run.evaluation for name, cell in point.cells.items() if cell.rows)
    return [name for name in names if name != "loss" and "/" not in name]


def sets(run: RecordedRun) -> list[str]:
    """Returns the names of further evaluation sets."""
    parts = (name.split("/") for point in run.evaluation for name in point.cells)
    return list(dict.fromkeys(part[1] for part in parts if len(part) == _SET_PARTS and part[0] == "eval"))


def metric_title(name: str) -> str:
    """Returns a metric's or figure's name as a heading."""
    return _TITLES.get(name) or (name.replace("_", " ").capitalize() if name.islower() else name)


def result(run: RecordedRun) -> str:
    """Returns the result of a run in a line: its first metric, else its loss; "" where there is none."""
    for kind in figures_of_runs([run]):
        if kind.name in (*metrics(run), "Training loss") and (figure := kind.of(run)):
            return f"{metric_title(kind.name)} {figure.text}"
    return ""


def more_is_better(metric: str) -> bool:
    """True if a larger value is better, by the metric's name: not for losses and errors."""
    return not any(word in metric.lower() for word in _WORSE)


def totals(run: RecordedRun) -> list[tuple[str, float]]:
    """Returns the seconds of each phase, in the order of `PHASES_EXPLAINED`; [] without timings.

    They come from the end record, which includes the time after the last metrics record. It covers one
    attempt only: after restarts, the sum over all records is taken.
    """
    found = {phase: run.end.get(f"time/{phase}") for phase in PHASES_EXPLAINED}
    if attempts(run) > 1 or not is_number(run.end.get("time/wall")):
        cells = {phase: over_rows(run.train, f"time/{phase}") for phase in PHASES_EXPLAINED}
        found = {phase: cell.total if cell else None for phase, cell in cells.items()}
    timed = {phase: float(seconds) for phase, seconds in found.items() if is_number(seconds)}
    if sum(max(0.0, seconds) for seconds in timed.values()) <= 0:
        return []
    # "unexplained" is shown even if it is 0.
    return [(phase, max(0.0, s)) for phase, s in timed.items() if s > 0 or phase == "unexplained"]


def attempts(run: RecordedRun) -> int:
    """Returns the number of attempts."""
    listed = run.manifest.get("attempts")
    return max(1, len(listed)) if isinstance(listed, list) else 1


def _seconds_between(one: Any, other: Any) -> float | None:
    try:
        started, ended = (datetime.strptime(str(at), "%Y-%m-%dT%H:%M:%S%z") for at in (one, other))
    except ValueError:
        return None
    return (ended - started).total_seconds()


def _wall(run: RecordedRun) -> Figure | None:
    seconds = _seconds_between(run.manifest.get("started"), run.manifest.get("ended"))
    if seconds is None or seconds < 0:
        timed = totals(run)
        seconds = sum(part for _, part in timed) if timed else None
    if seconds is None:
        return None
    tries = attempts(run)
    return Figure(seconds, duration(seconds), f"{tries} attempts, pauses included" if tries > 1 else "")


def _speed(value: float) -> str:
    return count(value) if 100 <= value < 1e7 else scaled(value)


class Rate(NamedTuple):
    """Rate of a whole run: a total over a time, that of its `end` record, or else of all train records.

    Attributes:
        title: Its title.
        name: Its name in records; a row of `trainer.observe.rows.RATES` has the time.
        text: Formats it.
        note: Note to display below it.
        better: 1 if more is better, 0 if neither is.
    """

    title: str
    name: str
    text: Callable[[float], str]
    note: str
    better: int = 1

    def of(self, run: RecordedRun) -> Figure | None:
        """Returns the rate of a run; None if its records don't have it."""
        value, cell = run.end.get(self.name), over_rows(run.train, self.name)
        if not is_number(value):
            if cell is None:
                return None
            value = cell.mean
        return Figure(float(value), self.text(value), self.note)


def _most(notes: Mapping[str, str]) -> Callable[[RecordedRun], Figure | None]:
    """Makes a figure of the largest value: of the first of these names that the records have."""

    def of(run: RecordedRun) -> Figure | None:
        for name, note in notes.items():
            if cell := over_rows(run.train, name):
                return Figure(cell.high, size(cell.high), note)
        return None

    return of


def _loss(run: RecordedRun) -> Figure | None:
    cells = [point.cells["loss"] for point in run.train if "loss" in point.cells and point.cells["loss"].rows]
    return Figure(cells[-1].mean, number(cells[-1].mean), "last record") if cells else None


def metric_scale(metric: str, cells: Iterable[Cell]) -> tuple[Scale, str]:
    """Returns the scale and unit of a metric, for figures and charts: accuracies from 0 to 1 as percent."""
    percent = metric.startswith(("accuracy", "top")) and all(
        -_ROUNDING <= cell.low <= cell.high <= 1 + _ROUNDING for cell in cells
    )
    return ("share", " correct") if percent else ("number", metric)


def metric_figure(metric: str, scale: Scale = "number") -> Callable[[RecordedRun], Figure | None]:
    """Makes a figure of the last value of a metric, with the best one below it."""

    def text(value: float) -> str:
        return f"{number(100 * value)}\u00a0%" if scale == "share" else number(value)

    def of(run: RecordedRun) -> Figure | None:
        cells = [
            (p.step, p.cells[metric]) for p in run.evaluation if metric in p.cells and p.cells[metric].rows
        ]
        if not cells:
            return None
        last = float(run.end[metric]) if is_number(run.end.get(metric)) else cells[-1][1].mean
        up = more_is_better(metric)
        step, cell = (max if up else min)(cells, key=lambda item: item[1].high if up else item[1].low)
        best = cell.high if up else cell.low
        note = "the best" if math.isclose(best, last) else f"best {text(best)} at step {count(step)}"
        return Figure(last, text(last), note)

    return of


def _share_of(phases: Iterable[str]) -> Callable[[RecordedRun], Figure | None]:
    def of(run: RecordedRun) -> Figure | None:
        timed = dict(totals(run))
        wall = sum(timed.values())
        if not wall:
            return None
        part = sum(timed.get(phase, 0.0) for phase in phases) / wall
        return Figure(part, share(part), "of the wall time")

    return of


def energy(run: RecordedRun) -> Figure | None:
    """Returns the energy of the run in joules."""
    joules = run.end.get("energy/joules") if attempts(run) == 1 else None
    if not is_number(joules):
        cell = over_rows(run.train, "energy/joules")
        joules = cell.total if cell else None
    if joules is None or joules <= 0:
        return None
    kwh = joules / 3.6e6
    return Figure(float(joules), scaled(float(joules), "J"), f"{number(kwh, 3)}\u00a0kWh")


def _cost(name: str, text: Callable[[float], str], note: str) -> Callable[[RecordedRun], Figure | None]:
    def of(run: RecordedRun) -> Figure | None:
        cost = run.end.get(name)
        return Figure(float(cost), text(float(cost)), note) if is_number(cost) else None

    return of


# In the currency of the run's price.
money = _cost("cost/money", number, "in the currency of its price")
money_per_thousand = _cost("cost/per_thousand_samples", lambda cost: number(cost, 3), "in the same currency")

_SPEEDS = (
    Rate("Throughput", "samples_per_s", _speed, "samples/s"),
    Rate("Tokens", "tokens_per_s", _speed, "tokens/s"),
    Rate("Arithmetic", "flops_per_s", lambda v: scaled(v, "FLOP/s"), "mean over the time"),
    Rate("MFU", "mfu", share, "mean over the time, of the peak"),
)
_MACHINE = (
    Rate("GPU busy", "gpu/utilization", share, "mean over the time"),
    Rate("CPUs used", "cpu/used", lambda v: number(v, 3), "mean over the time", 0),
)
RATES = (*_SPEEDS, *_MACHINE)

_COMPUTE = ("forward", "backward", "update")

KEY_FIGURES = (
    KeyFigure("Training loss", _loss, -1),
    KeyFigure("Wall time", _wall, -1),
    *(KeyFigure(rate.title, rate.of, rate.better) for rate in _SPEEDS),
    KeyFigure("Forward, backward, update", _share_of(_COMPUTE), 1),
    KeyFigure("Waiting for data", _share_of(["data"]), -1),
    *(KeyFigure(rate.title, rate.of, rate.better) for rate in _MACHINE),
    KeyFigure(
        "Device memory",
        _most({"memory/peak_bytes": "peak, allocated", "gpu/memory_bytes": "peak, as in nvidia-smi"}),
        -1,
    ),
    KeyFigure(
        "Memory", _most({"memory/rss_bytes": "peak, host of rank 0", "memory_bytes": "peak, rank 0"}), -1
    ),
    KeyFigure("Energy", energy, -1),
    KeyFigure("Cost", money, -1),
    KeyFigure("Cost of 1,000 samples", money_per_thousand, -1),
)


def figures_of_runs(runs: Sequence[RecordedRun]) -> list[KeyFigure]:
    """Returns the figures of these runs: their metrics first."""
    names = list(dict.fromkeys(name for run in runs for name in metrics(run)))[:6]
    own = []
    for name in names:
        scale, _ = metric_scale(name, [cell for run in runs if (cell := over_rows(run.evaluation, name))])
        own.append(KeyFigure(name, metric_figure(name, scale), 1 if more_is_better(name) else -1))
    return [*own, *KEY_FIGURES]


def status(run: RecordedRun) -> tuple[str, str]:
    """Returns the status of the run, and its reason."""
    return plain(run.manifest.get("status") or "unknown", 40), plain(run.manifest.get("reason") or "", 600)
