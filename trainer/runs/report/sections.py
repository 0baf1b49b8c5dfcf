"""Sections of the page: charts of the run. Each function takes the run and returns HTML, or nothing."""

from base64 import b64encode
from collections.abc import Iterable

from markupsafe import Markup

from trainer.host.files import oddity, read_inside
from trainer.observe.charts.axis import AxisKind
from trainer.observe.charts.lines import Line, Mark, line, line_chart
from trainer.observe.text import DASH, count, plain, size
from trainer.runs.report.figures import end_step, metric_scale, metric_title, metrics, over_rows, sets, totals
from trainer.runs.report.parts import html
from trainer.runs.report.phases import PHASES_EXPLAINED, phase_bar, phase_chart
from trainer.runs.report.read import KNOWN, OF_LOSSES, RecordedRun

_MARKS = 30
_ANSWER = 4000  # characters
_PICTURE_BYTES = 4 << 20  # of all pictures on a page
_PNG = b"\x89PNG\r\n\x1a\n"

# Charts: title, how values are written, unit, and curves by name; figures with "limit:" are drawn as limits.
_Chart = tuple[str, AxisKind, str, dict[str, str]]
_THROUGHPUT: tuple[_Chart, ...] = (
    ("Samples", "count", "samples/s", {"": "samples_per_s"}),
    ("Tokens", "count", "tokens/s", {"": "tokens_per_s"}),
    ("Arithmetic", "si", "FLOP/s", {"": "flops_per_s"}),
    ("Model FLOPs utilization (MFU)", "share", " of the peak", {"": "mfu"}),
)
_MEMORY: tuple[_Chart, ...] = (
    (
        "Device memory",
        "bytes",
        "",
        {
            "allocated": "memory/allocated_bytes",
            "peak allocated": "memory/peak_bytes",
            "reserved by torch": "memory/reserved_bytes",
            "used, by nvidia-smi": "gpu/memory_bytes",
            "there is": "limit:gpu/memory_total_bytes",
        },
    ),
    ("Host memory of rank 0 and its loader workers", "bytes", " resident", {"": "memory/rss_bytes"}),
    ("Allocations tried again", "count", "retries", {"": "memory/retries"}),
)
_MACHINE: tuple[_Chart, ...] = (
    ("CPUs", "number", "CPUs", {"used": "cpu/used", "by others": "cpu/others", "allowed": "limit:cpu/limit"}),
    ("Stopped by the CPU quota", "share", " of the wall time", {"": "cpu/throttled"}),
    ("Ready to run, without a CPU", "share", " of the wall time", {"": "cpu/starved"}),
    (
        "Loader workers",
        "share",
        " of their time",
        {
            "computing": "loader/cpu",
            "waiting for disk or network": "loader/blocked",
            "waiting for a CPU": "loader/starved",
        },
    ),
    ("Disk", "bytes", "/s", {"read": "disk/read_bytes_per_s", "written": "disk/written_bytes_per_s"}),
    (
        "Network",
        "bytes",
        "/s",
        {
            "received": "network/received_bytes_per_s",
            "sent": "network/sent_bytes_per_s",
            "within the host": "network/loopback_bytes_per_s",
        },
    ),
    ("GPU busy", "share", " of the time", {"": "gpu/utilization"}),
    ("GPU power", "number", "W", {"drawn": "gpu/power_w", "limit": "limit:gpu/power_limit_w"}),
    ("GPU temperature", "number", "°C", {"": "gpu/temperature_c"}),
    ("GPU clock", "number", "MHz", {"": "gpu/clock_mhz"}),
    ("GPU slowed down", "share", " of the time", {"": "gpu/throttled"}),
)
# Figures without a chart if they were always 0.
_RARE = {"memory/retries", "gpu/throttled", "cpu/throttled", "cpu/starved"}


def marks_of(run: RecordedRun) -> list[Mark]:
    """Returns anomalies and restarts as marks on the axes."""
    marks = list[Mark]()
    for number_, anomaly in enumerate(run.anomalies.all()[:_MARKS], 1):
        step = anomaly.get("step")
        if type(step) is int and step > 0:
            what = f"anomaly {number_}: {anomaly.get('kind')}, {anomaly.get('policy')}"
            marks.append(Mark(step, str(number_), what, True))
    listed = run.manifest.get("attempts")
    for attempt in (listed if isinstance(listed, list) else [])[1:_MARKS]:
        step = attempt.get("step") if isinstance(attempt, dict) else None
        if type(step) is int:
            marks.append(Mark(step, "↻", f"started again after step {step}", False))
    return marks


def charts_of(run: RecordedRun, charts: Iterable[_Chart]) -> list[Markup]:
    """Draws those charts for which the run has figures."""
    drawn = []
    for title, kind, unit, curves_ in charts:
        lines = list[Line]()
        for name, figure in curves_.items():
            found = figure.removeprefix("limit:")
            lines.append(line(name or title, run.train, found, -1 if found != figure else len(lines)))
        if not all(figure in _RARE for figure in curves_.values()) or any(
            cell.high > 0 for one in lines for _, cell in one.drawn
        ):
            drawn.append(line_chart(title, lines, end_step(run), kind, unit, zero=True))
    return drawn


def curves(run: RecordedRun) -> Markup:
    """Draws loss, metrics, learning rate, gradient norm, and further figures of the task."""
    last, marks = end_step(run), marks_of(run)

    def chart(title: str, name: str, unit: str, zero: bool = False, may_log: bool = False) -> Markup:
        curve = [line(title, run.train, name)]
        return line_chart(title, curve, last, unit=unit, zero=zero, may_log=may_log)

    others = list(enumerate(sets(run), 2))

    def evaluated(main: str, name: str) -> list[Line]:
        """Returns a metric's curves, one for each evaluation set."""
        more = (line(f"{one}", run.evaluation, f"eval/{one}/{name}", look) for look, one in others)
        return [line(main, run.evaluation, name, 1), *more]

    losses = [line("training", run.train, "loss"), *evaluated("evaluation", "loss")]
    shown = [line_chart("Loss", losses, last, unit="loss", may_log=True, marks=marks)]
    for name in metrics(run):
        cell = over_rows(run.evaluation, name)
        kind, unit = metric_scale(name, [cell] if cell else [])
        lines = evaluated("evaluation" if others else name, name)
        shown.append(line_chart(metric_title(name), lines, last, kind, unit))
    shown += [
        chart("Learning rate", "lr", "per update", zero=True),
        chart("Gradient norm", "grad_norm", "global norm", zero=True, may_log=True),
        chart("Loss scale", "loss_scale", "factor", may_log=True),
    ]
    names = dict.fromkeys(name for point in run.train for name in point.cells if name not in KNOWN)
    for name in (one for one in names if one.startswith(OF_LOSSES) or "/" not in one):
        cell, short = over_rows(run.train, name), name.removeprefix("watched/")
        kind, unit = metric_scale(short, [cell] if cell else [])
        shown.append(
            line_chart(f"{metric_title(short)}, training", [line(name, run.train, name)], last, kind, unit)
        )
    notes = ["Dashed verticals mark anomalies by their number, and restarts (↻)."] if marks else []
    if any(point.rows > 1 for point in run.train):
        notes.append("Rows are joined here: lines are their means, the pale band is their range.")
    return html("sections.charts", "Curves", shown, notes)


def of_hooks(run: RecordedRun) -> Markup:
    """Shows figures and pictures that hooks returned."""
    last = end_step(run)
    charts = list[Markup]()
    for name in dict.fromkeys(name for point in run.hook for name in point.cells):
        cell = over_rows(run.hook, name)
        kind, unit = metric_scale(name, [cell] if cell else [])
        charts.append(line_chart(metric_title(name), [line(name, run.hook, name)], last, kind, unit))
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
    return html("sections.hooks", charts, pictures)


def answer_table(run: RecordedRun) -> Markup | None:
    """Shows what the model answered to each prompt, at first and at last."""
    if not run.answers:
        return None
    prompts = [name for name in run.answers[-1] if name.startswith("answer/")]
    rows = [
        [name.removeprefix("answer/"), *(plain(one.get(name) or "", _ANSWER) for one in run.answers)]
        for name in prompts
    ]
    return html("sections.answers", [one["step"] for one in run.answers], rows)


def time(run: RecordedRun) -> Markup:
    """Draws the wall time by phase."""
    timed = totals(run)
    if not timed:
        return Markup()
    wall = sum(seconds for _, seconds in timed)
    collected = over_rows(run.train, "time/gc")
    bar = phase_bar(timed, "Wall time by phase", labeled=True)
    chart = phase_chart(run.train, end_step(run))
    return html(
        "sections.time", bar, timed, PHASES_EXPLAINED, chart, wall, collected.total if collected else 0
    )


def throughput(run: RecordedRun) -> Markup:
    """Draws samples, tokens and FLOPs per second."""
    counted, mfu = (over_rows(run.train, name) for name in ("flops_per_s", "mfu"))
    return html("sections.throughput", charts_of(run, _THROUGHPUT), counted, mfu)


def memory_charts(run: RecordedRun) -> Markup:
    """Draws memory of the device and of the host, over the run and by epoch."""
    charts = charts_of(run, _MEMORY)
    if not any(charts):
        charts = charts_of(run, [("Memory of rank 0", "bytes", "", {"": "memory_bytes"})])
    return html("sections.charts", "Memory", charts, (), _by_epoch(run) + _freed(run) + _why_more(run))


def _by_epoch(run: RecordedRun) -> Markup:
    """Builds a table of memory at the start and end of epochs: the first, some between, the last."""
    ends = {point.step: point.cells for point in run.epoch_end}
    starts = run.epoch_start
    every = max(1, -(-len(starts) // 6))
    shown = starts[::every] + ([] if (len(starts) - 1) % every == 0 else starts[-1:])
    known = ("memory/allocated_bytes", "memory/reserved_bytes", "memory/rss_bytes")
    names = [name for name in known if over_rows(starts, name) or over_rows(run.epoch_end, name)]
    if not shown or not names:
        return Markup()
    rows = []
    for point in shown:
        later = next((ends[step] for step in sorted(ends) if step >= point.step), {})
        cells = [found.get(name) for name in names for found in (point.cells, later)]
        rows.append([count(point.step), *(size(cell.mean) if cell and cell.rows else DASH for cell in cells)])
    heads = [f"{name[7:-6]}, {at}" for name in names for at in ("start", "end")]
    return html("parts.table", ["epoch from step", *heads], rows, right=range(len(heads) + 1))


def _freed(run: RecordedRun) -> Markup:
    given, took = (over_rows(run.freed, f"memory/freed_{what}") for what in ("bytes", "seconds"))
    if given is None:
        return Markup()
    return html("sections.freed", given.rows, given.mean, took.total if took else None)


def _why_more(run: RecordedRun) -> Markup:
    names = ("gpu/memory_bytes", "memory/reserved_bytes", "memory/allocated_bytes")
    shown, reserved, allocated = (over_rows(run.train, name) for name in names)
    if shown is None and (reserved is None or not reserved.high):
        return Markup()
    held = None
    if shown and reserved and allocated and shown.mean > reserved.mean >= allocated.mean:
        held = (allocated.mean, reserved.mean, shown.mean)
    return html("sections.why_more", held)


def machine(run: RecordedRun) -> Markup:
    """Draws CPU, loader, disk, network and GPU figures."""
    slowed = html("sections.slowed", run.throttled.most_common(5))
    return html("sections.charts", "Machine", charts_of(run, _MACHINE), ["The host of rank 0."], slowed)
