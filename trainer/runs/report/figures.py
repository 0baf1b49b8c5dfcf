"""Figures of a whole run, each as a number and as text; None where the run doesn't have it."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from trainer.observe.text import count, duration, number, plain, scaled, share, size
from trainer.runs.manifest import planned_steps
from trainer.runs.report.charts import Kind
from trainer.runs.report.read import RecordedRun
from trainer.runs.report.thin import Cell, Point, is_number, joined

_SET_PARTS = 3  # eval/NAME/metric
_ROUNDING = 1e-6  # of a mean over many samples
# The field's words for metrics whose names in records are not those.
_TITLES = {"map": "mAP", "map_50": "mAP@50", "map_75": "mAP@75", "top5": "Top-5 accuracy"}
NO_METRICS = ("loss", "padding")  # of an evaluation's record; padding is the data's
_WORSE = ("loss", "error", "perplexity", "wer", "cer", "bits", "rmse", "mae", "mse")

# Phases in the order of the bar, the useful ones first.
PHASES_EXPLAINED = {
    "forward": "the model's forward pass",
    "backward": "its gradients",
    "update": "the optimizer's step, with clipping and loss scaling",
    "communication": "gradients between ranks, where not hidden by computation",
    "copy": "batches on their way to the device",
    "data": "waiting for the next batch",
    "host": "Python between the others",
    "evaluation": "evaluating the model",
    "checkpoint": "training paused for a checkpoint",
    "logging": "reading and writing metrics",
    "start": "until the first step: late imports, loader workers",
    "end": "after the last step",
    "unexplained": "time that no timer covers",
}


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
    """Returns the names of the evaluations' metrics other than the loss, the deciding one first."""
    names = dict.fromkeys(name for point in run.evaluation for name, cell in point.cells.items() if cell.rows)
    found = [name for name in names if name not in NO_METRICS and "/" not in name]
    return sorted(found, key=lambda name: name != run.manifest.get("metric"))


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


def status(run: RecordedRun) -> tuple[str, str]:
    """Returns the status of the run, and its reason."""
    return plain(run.manifest.get("status") or "unknown", 40), plain(run.manifest.get("reason") or "", 600)


def gpus_of(run: RecordedRun) -> str:
    """Formats the GPUs of a run's manifest; empty if there are none."""
    device = run.manifest.get("device")
    listed = device.get("gpus") if isinstance(device, dict) else None
    gpus = [str(gpu) for gpu in listed] if isinstance(listed, list) else []
    return ", ".join(f"{gpus.count(gpu)} \u00d7 {gpu}" for gpu in list(dict.fromkeys(gpus))[:4])


def more_is_better(metric: str, manifest: Mapping[str, Any]) -> bool:
    """True if a larger value is better: as the task says; else by name: not of losses and errors."""
    if metric == manifest.get("metric"):
        return manifest.get("lower_is_better") is not True
    return not any(word in metric.lower() for word in _WORSE)


def totals(run: RecordedRun) -> list[tuple[str, float]]:
    """Returns the seconds of each phase, in the order of `PHASES_EXPLAINED`; [] without timings.

    They come from the end record, which covers all attempts and the time after the last metrics record; of a
    run without one they are sums over its records.
    """
    found = {phase: run.end.get(f"time/{phase}") for phase in PHASES_EXPLAINED}
    if not is_number(run.end.get("time/wall")):
        cells = {phase: over_rows(run.train, f"time/{phase}") for phase in PHASES_EXPLAINED}
        found = {phase: cell.total if cell else None for phase, cell in cells.items()}
    timed = {phase: max(0.0, seconds) for phase, seconds in found.items() if is_number(seconds)}
    # "unexplained" is shown even if it is 0.
    shown = [(phase, seconds) for phase, seconds in timed.items() if seconds or phase == "unexplained"]
    return shown if any(timed.values()) else []


def _wall(run: RecordedRun) -> Figure | None:
    seconds = sum(part for _, part in totals(run))
    try:
        times = (run.manifest.get(name) for name in ("started", "ended"))
        started, ended = (datetime.strptime(str(at), "%Y-%m-%dT%H:%M:%S%z") for at in times)
        seconds = max(0.0, (ended - started).total_seconds()) or seconds
    except ValueError:  # it still trains
        pass
    listed = run.manifest.get("attempts")
    tries = len(listed) if isinstance(listed, list) else 1
    note = f"{tries} attempts, pauses included" if tries > 1 else ""
    return Figure(seconds, duration(seconds), note) if seconds else None


class Rate(NamedTuple):
    """Rate of a whole run: a total over a time, that of its `end` record, or else of all train records.

    Attributes:
        title: Its title.
        name: Its name in records; a row of `trainer.observe.rows.SPAN_OF_RATES` has the time.
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


def _largest(notes: Mapping[str, str]) -> Callable[[RecordedRun], Figure | None]:
    """Makes a figure of the largest value: of the first of these names that the records have."""

    def of(run: RecordedRun) -> Figure | None:
        for name, note in notes.items():
            if cell := over_rows(run.train, name):
                return Figure(cell.high, size(cell.high), note)
        return None

    return of


def _loss(run: RecordedRun) -> Figure | None:
    cells = [cell for point in run.train if (cell := point.cells.get("loss")) and cell.rows]
    return Figure(cells[-1].mean, number(cells[-1].mean), "last record") if cells else None


def metric_scale(metric: str, cells: Iterable[Cell | None]) -> tuple[Kind, str]:
    """Returns the scale and unit of a metric, for figures and charts: accuracies from 0 to 1 as percent."""
    percent = metric.startswith(("accuracy", "top")) and all(
        -_ROUNDING <= cell.low <= cell.high <= 1 + _ROUNDING for cell in cells if cell
    )
    return ("share", "correct") if percent else ("number", metric)


def _metric_figure(metric: str, scale: Kind) -> Callable[[RecordedRun], Figure | None]:
    """Makes a figure of the last value of a metric, with the best one below it."""

    def text(value: float) -> str:
        return f"{number(100 * value)}\u00a0%" if scale == "share" else number(value)

    def of(run: RecordedRun) -> Figure | None:
        cells = [
            (point.step, cell) for point in run.evaluation if (cell := point.cells.get(metric)) and cell.rows
        ]
        if not cells:
            return None
        last = float(run.end[metric]) if is_number(run.end.get(metric)) else cells[-1][1].mean
        up = more_is_better(metric, run.manifest)
        step, cell = (max if up else min)(cells, key=lambda item: item[1].high if up else item[1].low)
        best = cell.high if up else cell.low
        note = "the best" if math.isclose(best, last) else f"best {text(best)} at step {count(step)}"
        return Figure(last, text(last), note)

    return of


def _share_of(*phases: str) -> Callable[[RecordedRun], Figure | None]:
    def of(run: RecordedRun) -> Figure | None:
        timed = dict(totals(run))
        if not (wall := sum(timed.values())):
            return None
        part = sum(timed.get(phase, 0.0) for phase in phases) / wall
        return Figure(part, share(part), "of the wall time")

    return of


def _energy(run: RecordedRun) -> Figure | None:
    joules = run.end.get("energy/joules")
    if not is_number(joules):
        cell = over_rows(run.train, "energy/joules")
        joules = cell.total if cell else 0.0
    note = f"{number(joules / 3.6e6, 3)}\u00a0kWh, GPUs of rank 0's host"
    return Figure(float(joules), scaled(joules, "J"), note) if joules > 0 else None


def _cost(name: str) -> Callable[[RecordedRun], Figure | None]:
    def of(run: RecordedRun) -> Figure | None:
        cost = run.end.get(name)
        return Figure(cost, number(cost), "in the currency of the price") if is_number(cost) else None

    return of


_SPEEDS = (
    Rate("Throughput", "samples_per_s", lambda v: count(v) if 100 <= v < 1e7 else scaled(v), "samples/s"),
    Rate("Tokens", "tokens_per_s", lambda v: count(v) if 100 <= v < 1e7 else scaled(v), "tokens/s"),
    Rate("Arithmetic", "flops_per_s", lambda v: scaled(v, "FLOP/s"), "mean over the time"),
    Rate("MFU", "mfu", share, "mean over the time, of the peak"),
)
_MACHINE = (
    Rate("GPU busy", "gpu/utilization", share, "mean over the time"),
    Rate("CPUs used", "cpu/used", lambda v: number(v, 3), "mean over the time", 0),
)
RATES = (*_SPEEDS, *_MACHINE)
_GPU_MEMORY = {"memory/peak_bytes": "peak, allocated", "gpu/memory_bytes": "peak, as in nvidia-smi"}
_MEMORY = {"memory/rss_bytes": "peak, host of rank 0", "memory_bytes": "peak, rank 0"}

KEY_FIGURES = (
    KeyFigure("Training loss", _loss, -1),
    KeyFigure("Wall time", _wall, -1),
    *(KeyFigure(rate.title, rate.of, rate.better) for rate in _SPEEDS),
    KeyFigure("Forward, backward, update", _share_of("forward", "backward", "update"), 1),
    KeyFigure("Waiting for data", _share_of("data"), -1),
    *(KeyFigure(rate.title, rate.of, rate.better) for rate in _MACHINE),
    KeyFigure("Device memory", _largest(_GPU_MEMORY), -1),
    KeyFigure("Memory", _largest(_MEMORY), -1),
    KeyFigure("Energy", _energy, -1),
    KeyFigure("Cost", _cost("cost/money"), -1),
    KeyFigure("Cost of 1,000 samples", _cost("cost/per_thousand_samples"), -1),
)


def figures_of_runs(runs: Sequence[RecordedRun]) -> list[KeyFigure]:
    """Returns the figures of these runs: their metrics first."""
    names = list(dict.fromkeys(name for run in runs for name in metrics(run)))[:6]
    own = []
    for name in names:
        scale, _ = metric_scale(name, [over_rows(run.evaluation, name) for run in runs])
        decided = next((run.manifest for run in runs if run.manifest.get("metric") == name), {})
        own.append(KeyFigure(name, _metric_figure(name, scale), 1 if more_is_better(name, decided) else -1))
    return [*own, *KEY_FIGURES]
