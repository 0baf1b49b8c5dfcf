"""Page of a run: one file that includes its style, without external resources or scripts.

The templates lay out what is computed here. They escape all values that aren't `Markup`.
"""

import re
import time
from base64 import b64encode
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from pydantic import BaseModel, Field, ValidationError

from trainer.config.idle import is_read
from trainer.host.files import oddity, read_inside
from trainer.host.latest import EVALUATION
from trainer.observe.text import DASH, count, duration, number, plain, scaled, share, size
from trainer.runs.differences import flat
from trainer.runs.manifest import planned_steps
from trainer.runs.report import figures
from trainer.runs.report.charts import Kind, Line, Mark, confusion_chart, line, line_chart, phase_bar
from trainer.runs.report.compare import compared
from trainer.runs.report.figures import end_step, metric_scale, metric_title, over_rows
from trainer.runs.report.read import KNOWN, OF_LOSSES, REPLACED, RecordedRun
from trainer.runs.report.thin import is_number

# Mark by which a report is recognized: files without it are never overwritten.
MARK = '<p class="over"><span>trainer report</span>'

_MARKS = 30
_ANSWER = 4000  # characters
_PARTS = 40  # of a model
_ITEMS = 20  # of a section of the manifest
_PICTURE_BYTES = 4 << 20  # of all pictures on a page
_PNG = b"\x89PNG\r\n\x1a\n"
_EVALUATION_BYTES = 8 << 20  # a matrix of 1,000 classes has at most 1,000,000 cells: larger ones are left out
_MOST_CLASSES = 40  # of a matrix on the page
_BASE64 = re.compile(r"[A-Za-z0-9+/]+=*")

# Charts: title, how values are written, unit, and curves by name; figures with "limit:" are drawn as limits.
_Chart = tuple[str, Kind, str, dict[str, str]]
_CHARTS: dict[str, tuple[_Chart, ...]] = {
    "Throughput": (
        ("Samples", "count", "samples/s", {"": "samples_per_s"}),
        ("Tokens", "count", "tokens/s", {"": "tokens_per_s"}),
        ("Model FLOPs utilization (MFU)", "share", "of the peak", {"": "mfu"}),
    ),
    "Memory": (
        (
            "Device memory",
            "bytes",
            "",
            {
                "allocated": "memory/allocated_bytes",
                "reserved by torch": "memory/reserved_bytes",
                "used, by nvidia-smi": "gpu/memory_bytes",
                "there is": "limit:gpu/memory_total_bytes",
            },
        ),
        ("Host memory of rank 0 and its loader workers", "bytes", "resident", {"": "memory/rss_bytes"}),
    ),
    "Machine": (
        (
            "CPUs",
            "number",
            "CPUs",
            {"used": "cpu/used", "by others": "cpu/others", "allowed": "limit:cpu/limit"},
        ),
        (
            "Loader workers",
            "share",
            "of their time",
            {
                "computing": "loader/cpu",
                "waiting for disk or network": "loader/blocked",
                "waiting for a CPU": "loader/starved",
            },
        ),
        ("Disk", "bytes", "per second", {"read": "disk/read_bytes_per_s"}),
        ("GPU busy", "share", "of the time", {"": "gpu/utilization"}),
        ("GPU power", "number", "W", {"drawn": "gpu/power_w", "limit": "limit:gpu/power_limit_w"}),
        ("GPU slowed down", "share", "of the time", {"": "gpu/throttled"}),
    ),
}

_Number = Annotated[int, Field(ge=0)]


class _Mistake(BaseModel):
    sample: _Number
    label: _Number
    predicted: _Number
    sure: Annotated[float, Field(ge=0, le=1)]
    png: str = ""


class _Evaluation(BaseModel):
    weights: str
    set: str
    samples: _Number
    metrics: dict[str, float | None]
    classes: list[str]
    confusion: list[tuple[_Number, _Number, _Number]] = []
    mistakes: list[_Mistake] = []


def page(runs: Sequence[RecordedRun]) -> str:
    """Returns the report of a run, or of several side by side, as HTML."""
    one = len(runs) == 1
    return templates.get_template("run.html" if one else "runs.html").render(
        **(_one(runs[0]) if one else compared(runs, [verdict(run)[0] for run in runs])),
        mark=Markup(MARK),
        now=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        rows=sum(run.rows for run in runs),
        unreadable=sum(run.unreadable for run in runs),
    )


def _one(run: RecordedRun) -> dict[str, object]:
    name, timed, marks = plain(run.manifest.get("recipe") or run.name, 80), figures.totals(run), _marks(run)
    config, told = (_section(run.manifest.get(one)) for one in ("config", "model"))
    flat_config = flat(config)
    read = [(key, value) for key, value in flat_config.items() if is_read(config, key)]
    said, mood = verdict(run)
    return {
        "title": f"{name}, {figures.status(run)[0]}",
        "over": plain(run.name, 120),
        "name": name,
        "result": figures.result(run),
        "said": said,
        "mood": mood,
        "figures": _key_figures(run),
        "m": defaultdict(lambda: None, run.manifest),
        "gpus": figures.gpus_of(run),
        "model": _model(told),
        "memory": told.get("memory"),
        "curves": _curves(run, marks),
        "notes": ["Dashed verticals mark anomalies by their number, and restarts (↻)."] * bool(marks)
        + ["Records are joined: lines are their means, the pale band is their range."]
        * any(point.rows > 1 for point in run.train),
        "evaluation": _evaluation(run),
        "answers": run.answers,
        "prompts": [key for key in (run.answers or [{}])[-1] if key.startswith("answer/")],
        "hooks": _hook_charts(run),
        "pictures": _pictures(run),
        "timed": timed,
        "wall": sum(seconds for _, seconds in timed),
        "bar": phase_bar(timed, "Wall time by phase", labeled=True) if timed else None,
        "charts": {title: _charts(run, charts) for title, charts in _CHARTS.items()},
        "throttled": run.throttled.most_common(5),
        "verdicts": [
            one for one in run.verdicts.items if one is not run.verdict or len(run.verdicts.items) == 1
        ],
        "left_out": (run.verdicts.left_out, run.anomalies.left_out),
        "anomalies": run.anomalies.items,
        "checkpoints": run.checkpoints[:50],
        "config": read[:400],
        "idle": len(flat_config) - len(read),
    }


def verdict(run: RecordedRun) -> tuple[Markup | str, str]:
    """Returns a summary of the run in a sentence, and whether it is "good", "bad" or "open"."""
    how, why = figures.status(run)
    if how not in ("finished", "running", "stopped"):
        return (f"The run {how}: {why}" if why else f"The run {how}."), "bad"
    if run.verdict is not None:
        return _sentence(run.verdict), "good" if run.verdict.get("cause") in (None, "", "none") else "bad"
    if how == "running" and run.verdicts.items:
        return Markup("So far: {}").format(_sentence(run.verdicts.items[-1])), "open"
    if how == "stopped":
        return f"The run was stopped{f': {why}' if why else '; it can go on.'}", "open"
    return "The run still trains; no verdict yet." if how == "running" else "No verdict was recorded.", "open"


def _sentence(row: dict[str, Any]) -> Markup | str:
    """Formats a verdict; its cause begins the sentence already, and is bold."""
    cause, text = plain(row.get("cause") or "", 40), plain(row.get("text") or "No verdict.", 600)
    if cause and (rest := text.removeprefix(f"{cause}: ")) != text:
        return Markup("<b>{}</b>: {}").format(cause, rest)
    return text[:1].upper() + text[1:]


def _key_figures(run: RecordedRun) -> list[tuple[str, str, str]]:
    """Returns the key figures: name, figure, and the note below it."""
    saved = [one.step for one in run.checkpoints[:1]]
    done = max([0, *saved, *(points[-1].step for points in (run.train, run.evaluation) if points)])
    planned = planned_steps(run.manifest)
    steps = f"{count(done)} steps" if planned is None else f"{count(done)} of {count(planned)} steps"
    found = ((metric_title(kind.name), kind.of(run)) for kind in figures.figures_of_runs([run]))
    return [
        ("Status", figures.status(run)[0], steps),
        *((title, one.text, one.note) for title, one in found if one),
    ]


def _model(told: dict[str, Any]) -> list[list[Any]]:
    """Returns the table of the model's parts, as at the start of the run."""
    rows = [row for row in (*_items(told.get("rows"))[:_PARTS], told.get("total")) if isinstance(row, dict)]
    formats = {"parameters": count, "trainable": count, "flops": scaled, "bytes": size}
    return [
        [
            plain(row.get("block"), 80),
            plain(row.get("kind"), 60),
            *(form(row[name]) if is_number(row.get(name)) else DASH for name, form in formats.items()),
        ]
        for row in rows
    ]


def _marks(run: RecordedRun) -> list[Mark]:
    """Returns anomalies and restarts as marks on the axes."""
    marks = list[Mark]()
    for number_, anomaly in enumerate(list(run.anomalies.items)[:_MARKS], 1 + run.anomalies.left_out):
        step = anomaly.get("step")
        if type(step) is int and step > 0:
            what = f"anomaly {number_}: {anomaly.get('kind')}, {anomaly.get('policy')}"
            marks.append(Mark(step, str(number_), what, True))
    for attempt in _items(run.manifest.get("attempts"))[1:_MARKS]:
        step = attempt.get("step") if isinstance(attempt, dict) else None
        if type(step) is int:
            marks.append(Mark(step, "↻", f"started again after step {step}", False))
    return marks


def _curves(run: RecordedRun, marks: Sequence[Mark]) -> list[Markup]:
    """Draws loss, metrics, learning rate, gradient norm, and further figures of the task."""
    last, others = end_step(run), list(enumerate(figures.sets(run), 2))

    def evaluated(main: str, name: str) -> list[Line]:
        """Returns a metric's curves, one for each evaluation set."""
        more = (line(f"{one}", run.evaluation, f"eval/{one}/{name}", look) for look, one in others)
        return [line(main, run.evaluation, name, 1), *more]

    losses = [line("training", run.train, "loss"), *evaluated("evaluation", "loss")]
    shown = [line_chart("Loss", losses, last, unit="loss", may_log=True, marks=marks)]
    for name in figures.metrics(run):
        kind, unit = metric_scale(name, [over_rows(run.evaluation, name)])
        lines = evaluated("evaluation" if others else name, name)
        shown.append(line_chart(metric_title(name), lines, last, kind, unit))
    for title, name, unit in (
        ("Learning rate", "lr", "per update"),
        ("Gradient norm", "grad_norm", "global norm"),
        ("Loss scale", "loss_scale", "factor"),
    ):
        curve = [line(title, run.train, name)]
        shown.append(line_chart(title, curve, last, unit=unit, zero=True, may_log=name != "lr"))
    names = dict.fromkeys(name for point in run.train for name in point.cells if name not in KNOWN)
    for name in (one for one in names if one.startswith(OF_LOSSES) or "/" not in one):
        short = name.removeprefix("watched/")
        kind, unit = metric_scale(short, [over_rows(run.train, name)])
        curve = [line(name, run.train, name)]
        shown.append(line_chart(f"{metric_title(short)}, training", curve, last, kind, unit))
    return shown


def _charts(run: RecordedRun, charts: Iterable[_Chart]) -> list[Markup]:
    """Draws those charts for which the run has figures."""
    drawn = []
    for title, kind, unit, curves in charts:
        lines = [
            line(name or title, run.train, figure.removeprefix("limit:"), -1 if ":" in figure else look)
            for look, (name, figure) in enumerate(curves.items())
        ]
        drawn.append(line_chart(title, lines, end_step(run), kind, unit, zero=True))
    return drawn


def _evaluation(run: RecordedRun) -> dict[str, Any] | None:
    """Returns what `trainer evaluate` found last; None if there is no such file, or an odd one."""
    try:
        found = _Evaluation.model_validate_json(read_inside(run.folder / EVALUATION, _EVALUATION_BYTES))
        names, matrix = dict(enumerate(found.classes)), None
        if found.confusion and len(names) <= _MOST_CLASSES:
            matrix = Markup(confusion_chart(found.confusion, found.classes))
        mistakes = [
            (one, names[one.label], names[one.predicted])
            for one in found.mistakes
            if _BASE64.fullmatch(one.png)
        ]
    except (OSError, ValidationError, LookupError):
        return None
    return {"found": found, "matrix": matrix, "mistakes": mistakes}


def _hook_charts(run: RecordedRun) -> list[Markup]:
    charts = list[Markup]()
    for name in dict.fromkeys(name for point in run.hook for name in point.cells):
        kind, unit = metric_scale(name, [over_rows(run.hook, name)])
        curve = [line(name, run.hook, name)]
        charts.append(line_chart(metric_title(name), curve, end_step(run), kind, unit))
    return charts


def _pictures(run: RecordedRun) -> list[tuple[str, int, str]]:
    """Returns the pictures of hooks: name, step and PNG in base64."""
    left, pictures = _PICTURE_BYTES, list[tuple[str, int, str]]()
    for name, (step, path) in run.pictures.items():
        try:
            if oddity((run.folder / path).parent, folder=True):
                continue
            png = read_inside(run.folder / path, left)
        except OSError:  # gone, too large, or a link
            continue
        if png.startswith(_PNG):
            left -= len(png)
            pictures.append((name, step, b64encode(png).decode()))
    return pictures


# --- filters of the templates ---


def short_hash(value: Any) -> Markup | str:
    """Shortens a hash; the whole is its tooltip."""
    if not isinstance(value, str) or not value:
        return "unknown"
    start, _, end = value.rpartition(":")
    short = f"{start}:" * bool(start) + end.rstrip("+")[:12] + "+" * end.endswith("+")
    return Markup('<code title="{}">{}</code>').format(plain(value), plain(short, 60))


def _moment(value: Any) -> str:
    return plain(value, 40).replace("T", " ") if isinstance(value, str) else DASH


def _local(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(min(max(seconds, 0.0), 4e9)))


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _section(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _pairs(value: Any) -> list[tuple[str, Any]]:
    return list(_section(value).items())[:_ITEMS]


def _figure(value: Any) -> str:
    if not is_number(value):
        return plain(value, 40)
    return count(value) if type(value) is int else number(value)


def _fraction(value: Any) -> str:
    return share(value) if is_number(value) and 0 <= value <= 1 else DASH


templates = Environment(
    autoescape=True,
    loader=PackageLoader("trainer.runs.report"),
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
templates.filters |= {
    **{"text": plain, "count": count, "size": size, "share": _fraction, "duration": duration},
    **{"hash": short_hash, "moment": _moment, "local": _local, "items": _items, "pairs": _pairs},
    **{"figure": _figure, "sentence": _sentence},
}
templates.globals |= {"replaced": REPLACED, "meant": figures.PHASES_EXPLAINED, "longest_answer": _ANSWER}
