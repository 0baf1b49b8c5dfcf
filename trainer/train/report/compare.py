"""The parts of the page about several runs, side by side."""

import math
from collections.abc import Sequence
from typing import Any

from trainer.observe.charts.axis import Kind as Scale
from trainer.observe.charts.lines import Line, line, line_chart
from trainer.observe.charts.thin import thinned
from trainer.observe.text import DASH, escaped, plain
from trainer.train.differences import flat
from trainer.train.report.figures import Figure, joined, kinds, last_step, metrics, scale_of, status, totals
from trainer.train.report.parts import grid, section, sortable, table
from trainer.train.report.phases import PHASES, phase_bar
from trainer.train.report.read import RecordedRun
from trainer.train.report.record import gpus_of, hash_of, verdict
from trainer.train.report.sections import title_of

_POINTS = 1600  # of a chart, over all runs
_DIFFERENCES = 200

# Of a manifest, besides the configuration.
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


def names_of(runs: Sequence[RecordedRun]) -> list[str]:
    """A name for each run that no other has, as text."""
    names = [plain(run.name, 40) for run in runs]
    paths = [plain(f"{run.folder.resolve().parent.name}/{run.name}", 60) for run in runs]
    names = [path if names.count(name) > 1 else name for name, path in zip(names, paths, strict=True)]
    return [f"{n}: {name}" if names.count(name) > 1 else name for n, name in enumerate(names, 1)]


def key_figures(runs: Sequence[RecordedRun], names: Sequence[str]) -> str:
    """A table with a row for each run, sorted by the column that is chosen; the best of a column is bold."""
    heads, columns, orders = ["Status"], [[status(run)[0] for run in runs]], list[list[int]]()
    orders.append(_order([float(text != columns[0][0]) for text in columns[0]]))
    for kind in kinds(runs):
        figures = [kind.of(run) for run in runs]
        if any(figures):
            best = _best(figures, kind.better)
            heads.append(_heading(kind.name, figures))
            columns.append([_cell(figure, best) for figure in figures])
            sign = -1 if kind.better > 0 else 1
            orders.append(_order([math.inf if one is None else sign * one.value for one in figures]))
    said = [f'<span class="long">{verdict(run)[0]}</span>' for run in runs]
    return section(
        "Key figures",
        sortable(["Run", *heads, "Verdict"], zip(_heads(names), *columns, said, strict=True), orders),
        "The best of a column is bold. Choose a column to sort the runs by it, the best first.",
    )


def _order(values: Sequence[float]) -> list[int]:
    """The place of each value among all."""
    places = sorted(range(len(values)), key=values.__getitem__)
    return [places.index(n) for n in range(len(values))]


def _heads(names: Sequence[str]) -> list[str]:
    return [
        f'<i class="c{n % 7}{" dashed" * (n >= 7)}"></i>{escaped(name, 60)}' for n, name in enumerate(names)
    ]


def _heading(name: str, figures: Sequence[Figure | None]) -> str:
    units = {figure.note for figure in figures if figure and figure.note.endswith("/s")}
    return escaped(name.capitalize() if name.islower() else name, 60) + "".join(f", {unit}" for unit in units)


def _best(figures: Sequence[Figure | None], better: int) -> str | None:
    """The text of the best figure; None if nobody can tell."""
    found = [figure for figure in figures if figure]
    if not better or len({figure.text for figure in found}) < 2:
        return None
    return (max if better > 0 else min)(found, key=lambda figure: figure.value).text


def _cell(figure: Figure | None, best: str | None) -> str:
    if figure is None:
        return DASH
    text = f"<b>{figure.text}</b>" if figure.text == best else figure.text
    return text if figure.note.endswith("/s") or not figure.note else f"{text}<small>{figure.note}</small>"


def differences(runs: Sequence[RecordedRun], names: Sequence[str]) -> str:
    """Keys of the configuration and facts of the manifest that aren't the same in all."""
    facts = [_facts(run.manifest) for run in runs]
    keys = list(dict.fromkeys(key for one in facts for key in one))
    rows = []
    for key in keys:
        values = [plain(one.get(key), 80) if key not in _HASHES else one.get(key) for one in facts]
        if any(value != values[0] for value in values):
            show = hash_of if key in _HASHES else escaped
            rows.append([f"<code>{escaped(key, 80)}</code>", *(show(value) for value in values)])
    if not rows:
        return section(
            "Differences", '<p class="prose">Configuration, code and environment are the same.</p>'
        )
    return section(
        "Differences",
        table(["", *_heads(names)], rows[:_DIFFERENCES]),
        "What isn&rsquo;t the same of configuration, code and environment.",
    )


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


def curves(runs: Sequence[RecordedRun], names: Sequence[str]) -> str:
    """The same figure of all runs in one chart."""
    last = max(last_step(run) for run in runs)
    each = max(40, _POINTS // len(runs))
    train = [thinned(run.train, each) for run in runs]
    evaluation = [thinned(run.evaluation, each) for run in runs]

    def lines(points: Sequence[Any], figure: str) -> list[Line]:
        return [line(name, own, figure, n) for n, (name, own) in enumerate(zip(names, points, strict=True))]

    charts = list[str]()
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
                cells = [cell for own in evaluation if (cell := joined(own, name))]
                scale, label = scale_of(name, cells)
                charts.append(
                    line_chart(title_of(name), lines(evaluation, name), last, scale, label, keyed=False)
                )
    return section("Curves", _key(names) + grid(*charts))


def _key(names: Sequence[str]) -> str:
    return f'<ul class="key runs">{"".join(f"<li>{head}</li>" for head in _heads(names))}</ul>'


def time(runs: Sequence[RecordedRun], names: Sequence[str]) -> str:
    """Where the wall time of each went."""
    timed = [totals(run) for run in runs]
    bars = "".join(
        f'<div class="run"><span>{escaped(name, 60)}</span>{phase_bar(parts, name, labeled=False)}</div>'
        for name, parts in zip(names, timed, strict=True)
        if parts
    )
    used = [phase for phase in PHASES if any(phase in dict(parts) for parts in timed)]
    key = "".join(f'<li><i class="p-{phase}"></i>{phase}</li>' for phase in used)
    return section("Time", f'<ul class="key">{key}</ul>{bars}' if bars else "", "Shares of the wall time.")
