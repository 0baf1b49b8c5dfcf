"""Sections of the page: what was run, and findings. Each function takes the run and returns HTML."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from trainer.config.idle import is_read
from trainer.observe.text import DASH, count, number, plain, scaled, share, size
from trainer.runs.differences import flat
from trainer.runs.manifest import planned_steps
from trainer.runs.report.figures import (
    energy,
    figures_of_runs,
    is_number,
    metric_title,
    money,
    money_per_thousand,
    status,
)
from trainer.runs.report.parts import html, items, moment, pairs
from trainer.runs.report.read import RecordedRun

_VERDICTS = 6
_PARTS = 40
_GOOD = {"finished", "running", "stopped"}


def verdict(run: RecordedRun) -> tuple[Markup | str, str]:
    """Returns a summary of the run in a sentence, and whether it is "good", "bad" or "open"."""
    how, why = status(run)
    if how not in _GOOD:
        return (f"The run {how}: {why}" if why else f"The run {how}."), "bad"
    if run.verdict is not None:
        nothing = run.verdict.get("cause") in (None, "", "none")
        return _sentence(run.verdict), "good" if nothing else "bad"
    latest = run.verdicts.all()[-1:] if how == "running" else []
    if latest:
        return Markup("So far: {}").format(_sentence(latest[0])), "open"
    if how == "stopped":
        return (f"The run was stopped: {why}" if why else "The run was stopped; it can go on."), "open"
    return (
        "The run still trains; no verdict yet." if how == "running" else "No verdict was recorded."
    ), "open"


def _cause_and_sentence(row: dict[str, Any]) -> tuple[str, str]:
    """Returns cause and sentence of a verdict, as text; a cause that begins the sentence isn't repeated."""
    cause, text = plain(row.get("cause") or "", 40), plain(row.get("text") or "No verdict.", 600)
    return cause, text.removeprefix(f"{cause}: ")


def _sentence(row: dict[str, Any]) -> Markup | str:
    cause, text = _cause_and_sentence(row)
    if cause in ("", "none") or text == plain(row.get("text"), 600):
        return text[:1].upper() + text[1:]
    return Markup("<b>{}</b>: {}").format(cause, text)


def key_figures(run: RecordedRun) -> list[tuple[str, str, str]]:
    """Returns the key figures: name, figure, and the note below it."""
    cells = [("Status", status(run)[0], _progress(run))]
    for kind in figures_of_runs([run]):
        if figure := kind.of(run):
            cells.append((metric_title(kind.name), figure.text, figure.note))
    return cells


def _progress(run: RecordedRun) -> str:
    saved = [one.step for one in run.checkpoints[:1]]
    done = max([0, *saved, *(points[-1].step for points in (run.train, run.evaluation) if points)])
    planned = planned_steps(run.manifest)
    return f"{count(done)} steps" if planned is None else f"{count(done)} of {count(planned)} steps"


def what(run: RecordedRun) -> Markup:
    """Builds the section of what was run: enough to run it again."""
    device = dict(pairs(run.manifest.get("device")))
    devices = (gpus_of(device), device.get("cpu") or device.get("name"))
    return html("record.what", defaultdict(lambda: None, run.manifest), devices)


def model(run: RecordedRun) -> Markup:
    """Builds the table of the model's parts, as at the start of the run."""
    told = run.manifest.get("model")
    told = told if isinstance(told, dict) else {}
    total = [told["total"]] if isinstance(told.get("total"), dict) else []
    listed = [row for row in items(told.get("rows"))[:_PARTS] if isinstance(row, dict)]
    rows = [
        [
            Markup("<code>{}</code>").format(plain(row.get("block"), 80)),
            plain(row.get("kind"), 60),
            *(_figure(row, name) for name in ("parameters", "trainable")),
            scaled(flops) if is_number(flops := row.get("flops")) else DASH,
            size(held) if is_number(held := row.get("bytes")) else DASH,
        ]
        for row in (*listed, *total)
    ]
    return html("record.model", rows, told.get("memory"))


def gpus_of(device: dict[str, Any]) -> str:
    """Formats the GPUs of a manifest's device; empty if there are none."""
    gpus = [str(gpu) for gpu in items(device.get("gpus"))]
    return ", ".join(f"{gpus.count(gpu)} \u00d7 {gpu}" for gpu in list(dict.fromkeys(gpus))[:4])


def findings(run: RecordedRun) -> Markup:
    """Builds the section of verdicts during the run, anomalies, and slow ranks."""
    anomalies = [
        [
            *(_figure(one, name) for name in ("number", "step")),
            *(plain(one.get(name), 40) for name in ("kind", "policy")),
            *(_figure(one, name) for name in ("loss", "grad_norm", "median")),
            moment(one.get("time")),
        ]
        for one in run.anomalies.all()
    ]
    slow = [
        [
            rank,
            plain(phase, 40),
            count(one.rows),
            share(one.seconds / one.wall),
            share(one.most),
            count(one.step),
        ]
        for (rank, phase), one in sorted(run.slow.items(), key=lambda item: -item[1].seconds)[:10]
    ]
    every = [one for one in run.verdicts.all() if one is not run.verdict or run.verdicts.count == 1]
    told = [(*_cause_and_sentence(one), one) for one in every]
    verdicts = [[_figure(one, "step"), cause, _share(one.get("share")), text] for cause, text, one in told]
    left_out = [found.count - len(found.all()) for found in (run.verdicts, run.anomalies)]
    causes = _causes(told) if len(verdicts) > _VERDICTS else []
    return html("record.findings", verdicts, causes, anomalies, slow, left_out)


def _causes(told: Sequence[tuple[str, str, dict[str, Any]]]) -> list[list[str]]:
    """Groups many verdicts by cause, the most frequent first."""
    found = dict[str, list[tuple[Any, str]]]()
    for cause, text, row in told:
        found.setdefault(cause, []).append((row.get("share"), text))
    rows = []
    for cause, each in sorted(found.items(), key=lambda item: -len(item[1])):
        costs = [cost for cost, _ in each if is_number(cost) and 0 <= cost <= 1]
        rows.append([cause, count(len(each)), share(sum(costs) / len(costs)) if costs else DASH, each[-1][1]])
    return rows


def _figure(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    if value is None:
        return DASH
    if not is_number(value):
        return plain(value, 40)
    return count(value) if type(value) is int else number(value)


def _share(value: Any) -> str:
    return share(value) if is_number(value) and 0 <= value <= 1 else DASH


def cost(run: RecordedRun) -> Markup:
    """Builds the section of energy and money."""
    found = {"energy": energy(run), "money": money(run), "per thousand samples": money_per_thousand(run)}
    rows = [[name, figure.text, figure.note] for name, figure in found.items() if figure]
    return html("record.cost", rows, found["energy"])


def configuration(run: RecordedRun) -> Markup:
    """Builds the table of all configuration keys."""
    config = run.manifest.get("config")
    config = config if isinstance(config, dict) else {}
    every = flat(config)
    keys = [(key, value) for key, value in every.items() if is_read(config, key)]
    return html("record.configuration", keys, len(every) - len(keys))
