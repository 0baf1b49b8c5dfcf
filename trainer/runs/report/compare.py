"""Sections of a report about several runs, side by side."""

import math
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from trainer.observe.charts.axis import AxisKind as Scale
from trainer.observe.charts.lines import Line, line, line_chart
from trainer.observe.charts.thin import thinned
from trainer.observe.text import DASH, plain
from trainer.runs.differences import flat
from trainer.runs.report.figures import (
    Figure,
    end_step,
    figures_of_runs,
    metric_scale,
    metric_title,
    metrics,
    over_rows,
    status,
    totals,
)
from trainer.runs.report.parts import html, short_hash
from trainer.runs.report.phases import PHASES_EXPLAINED, phase_bar
from trainer.runs.report.read import RecordedRun
from trainer.runs.report.record import gpus_of, verdict

_POINTS = 1600  # of a chart, over all runs
_DIFFERENCES = 200

# Compared facts of a manifest other than the configuration.
_FACTS = ("recipe", "commit", "lock", "image", "world_size", "threads", "host", "restarts")
_HASHES = ("commit", "lock", "image")
_CHARTS: tuple[tuple[str, str, Scale, str, bool], ...] = (
    ("Training loss", "loss", "number", "loss", False),
    ("Learning rate", "lr", "number", "per update", True),
    ("Gradient norm", "grad_norm", "number", "global norm", True),
    ("Samples", "samples_per_s", "count", "samples/s", True),
    ("Tokens", "tokens_per_s", "count", "tokens/s", True),
    ("Model FLOPs utilization", "mfu", "share", " of the peak", True),
    ("GPU busy", "gpu/utilization", "share", " of the time", True),
    ("Peak memory, allocated", "memory/peak_bytes", "bytes", "", True),
    ("Host memory", "memory/rss_bytes", "bytes", " resident", True),
)


def run_names(runs: Sequence[RecordedRun]) -> list[str]:
    """Returns a unique name for each run, as text."""
    names = [plain(run.name, 40) for run in runs]
    paths = [plain(f"{run.folder.resolve().parent.name}/{run.name}", 60) for run in runs]
    names = [path if names.count(name) > 1 else name for name, path in zip(names, paths, strict=True)]
    return [f"{n}: {name}" if names.count(name) > 1 else name for n, name in enumerate(names, 1)]


def key_figure_table(runs: Sequence[RecordedRun], names: Sequence[str]) -> Markup:
    """Builds a table with a row for each run, sorted by the selected column; the best of a column is bold."""
    heads, columns, orders = ["Status"], [[status(run)[0] for run in runs]], list[list[int]]()
    orders.append(_order([float(text != columns[0][0]) for text in columns[0]]))
    for kind in figures_of_runs(runs):
        figures = [kind.of(run) for run in runs]
        if any(figures):
            best = _best(figures, kind.better)
            heads.append(_heading(kind.name, figures))
            columns.append([_cell(figure, best) for figure in figures])
            sign = -1 if kind.better > 0 else 1
            orders.append(_order([math.inf if one is None else sign * one.value for one in figures]))
    said = [Markup('<span class="long">{}</span>').format(verdict(run)[0]) for run in runs]
    rows = list(zip(_heads(names), *columns, said, strict=True))
    return html("sections.key_figures", ["Run", *heads, "Verdict"], rows, orders)


def _order(values: Sequence[float]) -> list[int]:
    """Returns the rank of each value in sorted order."""
    places = sorted(range(len(values)), key=values.__getitem__)
    return [places.index(n) for n in range(len(values))]


def _heads(names: Sequence[str]) -> list[Markup]:
    return [html("parts.colored", name, n) for n, name in enumerate(names)]


def _heading(name: str, figures: Sequence[Figure | None]) -> str:
    units = {figure.note for figure in figures if figure and figure.note.endswith("/s")}
    return plain(metric_title(name), 60) + "".join(f", {unit}" for unit in units)


def _best(figures: Sequence[Figure | None], better: int) -> str | None:
    """Returns the text of the best figure; None if they can't be compared."""
    found = [figure for figure in figures if figure]
    if not better or len({figure.text for figure in found}) < 2:
        return None
    return (max if better > 0 else min)(found, key=lambda figure: figure.value).text


def _cell(figure: Figure | None, best: str | None) -> Markup | str:
    if figure is None:
        return DASH
    text = Markup("<b>{}</b>" if figure.text == best else "{}").format(figure.text)
    noted = figure.note and not figure.note.endswith("/s")
    return text + Markup("<small>{}</small>").format(figure.note) if noted else text


def differing(runs: Sequence[RecordedRun], names: Sequence[str]) -> Markup:
    """Builds the table of configuration keys and manifest facts that differ between runs."""
    facts = [_facts(run.manifest) for run in runs]
    keys = list(dict.fromkeys(key for one in facts for key in one))
    rows = []
    for key in keys:
        values = [plain(one.get(key), 80) if key not in _HASHES else one.get(key) for one in facts]
        if any(value != values[0] for value in values):
            shown = [short_hash(value) if key in _HASHES else value for value in values]
            rows.append([Markup("<code>{}</code>").format(plain(key, 80)), *shown])
    return html("sections.differences", ["", *_heads(names)], rows[:_DIFFERENCES])


def _facts(manifest: dict[str, Any]) -> dict[str, Any]:
    config, device, versions = (
        found if isinstance(found := manifest.get(name), dict) else {}
        for name in ("config", "device", "versions")
    )
    return {
        **flat(config),
        **{name: manifest[name] for name in _FACTS if name in manifest},
        **flat({"device": {**device, "gpus": gpus_of(device)}, "versions": versions}),
    }


def curves_of_runs(runs: Sequence[RecordedRun], names: Sequence[str]) -> Markup:
    """Draws the same figure of all runs in one chart."""
    last = max(end_step(run) for run in runs)
    each = max(40, _POINTS // len(runs))
    train = [thinned(run.train, each) for run in runs]
    evaluation = [thinned(run.evaluation, each) for run in runs]

    def lines(points: Sequence[Any], figure: str) -> list[Line]:
        return [line(name, own, figure, n) for n, (name, own) in enumerate(zip(names, points, strict=True))]

    charts = list[Markup]()
    for title, figure, kind, unit, zero in _CHARTS:
        may_log = figure in ("loss", "grad_norm")
        charts.append(line_chart(title, lines(train, figure), last, kind, unit, zero, may_log, keyed=False))
        if figure == "loss":
            charts.append(
                line_chart(
                    "Evaluation loss", lines(evaluation, "loss"), last, unit="loss", may_log=True, keyed=False
                )
            )
            found = dict.fromkeys(name for run in runs for name in metrics(run))
            for name in list(found)[:6]:
                cells = [cell for own in evaluation if (cell := over_rows(own, name))]
                scale, label = metric_scale(name, cells)
                charts.append(
                    line_chart(metric_title(name), lines(evaluation, name), last, scale, label, keyed=False)
                )
    return html("sections.curves", _heads(names), charts)


def times(runs: Sequence[RecordedRun], names: Sequence[str]) -> Markup:
    """Draws the wall time of each run by phase."""
    timed = {name: parts for name, run in zip(names, runs, strict=True) if (parts := totals(run))}
    bars = [(name, phase_bar(parts, name, labeled=False)) for name, parts in timed.items()]
    used = [phase for phase in PHASES_EXPLAINED if any(phase in dict(parts) for parts in timed.values())]
    return html("sections.times", bars, used)
