"""Page of several runs, side by side."""

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from trainer.observe.text import DASH, count, plain
from trainer.runs.differences import flat
from trainer.runs.report.charts import Kind, line, line_chart, phase_bar
from trainer.runs.report.figures import (
    PHASES_EXPLAINED,
    Figure,
    end_step,
    figures_of_runs,
    gpus_of,
    metric_scale,
    metric_title,
    metrics,
    over_rows,
    status,
    totals,
)
from trainer.runs.report.read import RecordedRun
from trainer.runs.report.thin import thinned

_POINTS = 1600  # of a chart, over all runs
_DIFFERENCES = 200

# Compared facts of a manifest other than the configuration.
_FACTS = ("recipe", "commit", "lock", "image", "world_size", "threads", "host", "restarts")
# Charts: title, figure, how values are written, unit, and whether the axis starts at 0.
_CHARTS: tuple[tuple[str, str, Kind, str, bool], ...] = (
    ("Training loss", "loss", "number", "loss", False),
    ("Learning rate", "lr", "number", "per update", True),
    ("Gradient norm", "grad_norm", "number", "global norm", True),
    ("Samples", "samples_per_s", "count", "samples/s", True),
    ("GPU busy", "gpu/utilization", "share", "of the time", True),
    ("Peak memory, allocated", "memory/peak_bytes", "bytes", "", True),
)


def compared(runs: Sequence[RecordedRun], said: Sequence[Markup | str]) -> dict[str, object]:
    """Returns what the page shows of several runs; `said` are their verdicts."""
    names = run_names(runs)
    recipes = list(dict.fromkeys(plain(run.manifest.get("recipe") or run.name, 60) for run in runs))
    timed = {name: parts for name, run in zip(names, runs, strict=True) if (parts := totals(run))}
    heads, columns = _key_figures(runs)
    return {
        "title": f"{len(runs)} runs",
        "over": "side by side",
        "name": f"{count(len(runs))} runs of {', '.join(recipes[:4])}{' …' * (len(recipes) > 4)}",
        "runs": names,
        "heads": [*heads, "Verdict"],
        "figures": list(zip(*columns, said, strict=True)),
        "differences": _differences(runs),
        "hashes": ("commit", "lock", "image"),
        "curves": _curves(runs, names),
        "bars": [(name, phase_bar(parts, name, labeled=False)) for name, parts in timed.items()],
        "phases": [p for p in PHASES_EXPLAINED if any(p in dict(parts) for parts in timed.values())],
    }


def run_names(runs: Sequence[RecordedRun]) -> list[str]:
    """Returns a unique name for each run, as text."""
    names = [plain(run.name, 40) for run in runs]
    paths = [plain(f"{run.folder.resolve().parent.name}/{run.name}", 60) for run in runs]
    names = [path if names.count(name) > 1 else name for name, path in zip(names, paths, strict=True)]
    return [f"{n}: {name}" if names.count(name) > 1 else name for n, name in enumerate(names, 1)]


def _key_figures(runs: Sequence[RecordedRun]) -> tuple[list[str], list[list[Any]]]:
    """Returns columns of key figures with their heads; the best of a column is bold."""
    heads, columns = ["Status"], [[status(run)[0] for run in runs]]
    for kind in figures_of_runs(runs):
        found = [kind.of(run) for run in runs]
        if any(found):
            best = _best(found, kind.better)
            heads.append(plain(metric_title(kind.name), 60))
            columns.append([_cell(figure, best) for figure in found])
    return heads, columns


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
    return text + Markup("<small>{}</small>").format(figure.note) if figure.note else text


def _differences(runs: Sequence[RecordedRun]) -> list[tuple[str, list[Any]]]:
    """Returns configuration keys and facts of the manifest that differ between runs, with their values."""
    facts = [_facts(run) for run in runs]
    keys = dict.fromkeys(key for one in facts for key in one)
    rows = [(key, [one.get(key) for one in facts]) for key in keys]
    return [(key, values) for key, values in rows if any(one != values[0] for one in values)][:_DIFFERENCES]


def _facts(run: RecordedRun) -> dict[str, Any]:
    manifest = run.manifest
    config, device, versions = (
        found if isinstance(found := manifest.get(name), dict) else {}
        for name in ("config", "device", "versions")
    )
    return {
        **flat(config),
        **{name: manifest[name] for name in _FACTS if name in manifest},
        **flat({"device": {**device, "gpus": gpus_of(run)}, "versions": versions}),
    }


def _curves(runs: Sequence[RecordedRun], names: Sequence[str]) -> list[Markup]:
    """Draws the same figure of all runs in one chart: training, then evaluations."""
    last = max(end_step(run) for run in runs)
    each = max(40, _POINTS // len(runs))
    train = [thinned(run.train, each) for run in runs]
    evaluation = [thinned(run.evaluation, each) for run in runs]
    charts = []
    for title, figure, kind, unit, zero in _CHARTS:
        lines = [line(name, own, figure, n) for n, (name, own) in enumerate(zip(names, train, strict=True))]
        may_log = figure in ("loss", "grad_norm")
        charts.append(line_chart(title, lines, last, kind, unit, zero, may_log, keyed=False))
    for figure in ["loss", *dict.fromkeys(name for run in runs for name in metrics(run))][:7]:
        pairs = enumerate(zip(names, evaluation, strict=True))
        lines = [line(name, own, figure, n) for n, (name, own) in pairs]
        kind, unit = metric_scale(figure, [over_rows(own, figure) for own in evaluation])
        title = "Evaluation loss" if figure == "loss" else metric_title(figure)
        charts.append(line_chart(title, lines, last, kind, unit, may_log=figure == "loss", keyed=False))
    return charts
