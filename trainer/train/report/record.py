"""The parts of the page that say what a run was and what was found. Each takes the run and gives HTML."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.config.idle import is_read
from trainer.observe.text import DASH, count, escaped, number, plain, scaled, share, size
from trainer.train.differences import flat
from trainer.train.report.figures import energy, is_number, kinds, money, money_per_thousand, status
from trainer.train.report.parts import section, table
from trainer.train.report.read import RecordedRun, Some

REPLACED = "replaced/"  # in a summary, before the name of a data set

_ATTEMPTS = 20
_KEYS = 400
_VERDICTS = 6
_PARTS = 40
_GOOD = {"finished", "running", "stopped"}


def verdict(run: RecordedRun) -> tuple[str, str]:
    """What to say of the run in a sentence, as HTML, and whether it is "good", "bad" or "open"."""
    how, why = status(run)
    if how not in _GOOD:
        return (f"The run {how}: {why}" if why else f"The run {how}."), "bad"
    if run.verdict is not None:
        nothing = run.verdict.get("cause") in (None, "", "none")
        return _sentence(run.verdict), "good" if nothing else "bad"
    latest = run.verdicts.all()[-1:] if how == "running" else []
    if latest:
        return f"So far: {_sentence(latest[0])}", "open"
    if how == "stopped":
        return (f"The run was stopped: {why}" if why else "The run was stopped; it can go on."), "open"
    return ("The run goes on; no verdict yet." if how == "running" else "No verdict was recorded."), "open"


def _told(row: dict[str, Any]) -> tuple[str, str]:
    """Cause and sentence of a verdict, as text; the cause isn't said twice."""
    cause, text = plain(row.get("cause") or "", 40), plain(row.get("text") or "No verdict.", 600)
    return cause, text.removeprefix(f"{cause}: ")


def _sentence(row: dict[str, Any]) -> str:
    cause, text = _told(row)
    if cause in ("", "none") or text == plain(row.get("text"), 600):
        return escaped(text[:1].upper() + text[1:], 600)
    return f"<b>{escaped(cause)}</b>: {escaped(text, 600)}"


def key_figures(run: RecordedRun) -> str:
    """The figures to look at first."""
    how, _ = status(run)
    cells = [("Status", f"<dd>{how}</dd>", _progress(run))]
    for kind in kinds([run]):
        if figure := kind.of(run):
            name = kind.name.replace("_", " ").capitalize() if kind.name.islower() else kind.name
            cells.append((name, f'<dd class="whole">{figure.text}</dd>', figure.note))
    items = "".join(
        f'<div><dt>{escaped(name, 60)}</dt>{text}<dd class="note">{note}</dd></div>'
        for name, text, note in cells
    )
    return f'<dl class="figures">{items}</dl>'


def _progress(run: RecordedRun) -> str:
    steps = run.manifest.get("steps")
    done = max([0, *(points[-1].step for points in (run.train, run.evaluation) if points)])
    if not is_number(steps):
        return f"{count(done)} steps"
    return f"{count(done)} of {count(steps)} steps"


def what(run: RecordedRun) -> str:
    """What was run: enough to run it again."""
    m = run.manifest
    device = dict(_items(m.get("device")))
    ranks = m.get("world_size")
    configuration = f"configuration {hash_of(m.get('config_hash'))}, seed {escaped(m.get('seed'), 40)}"
    threads = m.get("threads")
    each = (
        f"{escaped(ranks, 20)} rank{'s' * (ranks != 1)} of "
        f"{escaped(threads, 20)} thread{'s' * (threads != 1)}"
    )
    on = "; ".join(
        escaped(one, 120) for one in (gpus_of(device), device.get("cpu") or device.get("name")) if one
    )
    pairs = [
        ("Command", f"<code>{escaped(m.get('command'), 2000)}</code>"),
        ("Recipe", f"{escaped(m.get('recipe'), 200)}, {configuration}"),
        ("Commit", hash_of(m.get("commit")) + (" with uncommitted changes" if m.get("dirty") else "")),
        ("Environment", f"lock {hash_of(m.get('lock'))}, image {hash_of(m.get('image'))}"),
        (
            "Versions",
            ", ".join(f"{escaped(k, 40)}&nbsp;{escaped(v, 60)}" for k, v in _items(m.get("versions")) if v),
        ),
        ("Device", f"{on} ({each})"),
        ("Host", escaped(m.get("host"), 120)),
        ("Data", "; ".join(f"{escaped(k, 60)}: {escaped(v, 120)}" for k, v in _items(m.get("fingerprint")))),
        ("Time", f"{_moment(m.get('started'))} to {_moment(m.get('ended'))}"),
        ("Restarts", _attempts(m)),
        ("Began from", _beginning(m)),
        ("Replaced", _replaced(m)),
        ("Notes", "<br>".join(escaped(note, 1200) for note in _list(m.get("notes"))[:20])),
    ]
    rows = "".join(f"<div><dt>{name}</dt><dd>{text}</dd></div>" for name, text in pairs if text)
    return section("What was run", f'<dl class="facts">{rows}</dl>')


def _replaced(manifest: Mapping[str, Any]) -> str:
    """How many samples can't be decoded, and others stood in for; nothing if none."""
    counts = [(name, each) for name, each in _items(manifest.get("summary")) if name.startswith(REPLACED)]
    return ", ".join(
        f"{escaped(each, 20)} {escaped(name.removeprefix(REPLACED), 80)} samples" for name, each in counts
    )


def _beginning(manifest: Mapping[str, Any]) -> str:
    """The other run's checkpoint that it began from, and what differs; nothing if it began anew."""
    there = dict(_items(manifest.get("from")))
    if not there:
        return ""
    differs = "".join(f"<br>{escaped(line, 400)}" for line in _list(there.get("differs"))[:20])
    return f"{escaped(there.get('folder'), 400)}, step {escaped(there.get('step'), 20)}{differs}"


def model(run: RecordedRun) -> str:
    """The model by its parts, as the start of the run showed it."""
    told = run.manifest.get("model")
    told = told if isinstance(told, dict) else {}
    total = [told["total"]] if isinstance(told.get("total"), dict) else []
    listed = [row for row in _list(told.get("rows"))[:_PARTS] if isinstance(row, dict)]
    rows = [
        [
            f"<code>{escaped(row.get('block'), 80)}</code>",
            escaped(row.get("kind"), 60),
            *(_figure(row, name) for name in ("parameters", "trainable")),
            scaled(flops) if is_number(flops := row.get("flops")) else DASH,
            size(held) if is_number(held := row.get("bytes")) else DASH,
        ]
        for row in (*listed, *total)
    ]
    heads = ["part", "", "parameters", "trainable", "FLOPs a step", "memory"]
    note = f"Memory of each rank: {escaped(told.get('memory'), 240)}; activations come on top."
    return section("Model", table(heads, rows, right=(2, 3, 4, 5)) if rows else "", note)


def gpus_of(device: dict[str, Any]) -> str:
    """The GPUs of a manifest's device, as text; nothing if there are none."""
    gpus = [str(gpu) for gpu in _list(device.get("gpus"))]
    kinds_ = list(dict.fromkeys(gpus))[:4]
    return ", ".join(f"{gpus.count(kind)} \u00d7 {kind}" for kind in kinds_)


def hash_of(value: Any) -> str:
    """The start of a hash; all of it for those who hover."""
    if not isinstance(value, str) or not value:
        return "unknown"
    start, _, end = value.rpartition(":")
    short = f"{start}:" * bool(start) + end.rstrip("+")[:12] + "+" * end.endswith("+")
    return f'<code title="{escaped(value)}">{escaped(short, 60)}</code>'


def _moment(value: Any) -> str:
    return escaped(value, 40).replace("T", " ") if isinstance(value, str) else DASH


def _attempts(manifest: dict[str, Any]) -> str:
    listed = [one for one in _list(manifest.get("attempts")) if isinstance(one, dict)]
    lines = []
    for one in listed[1 : _ATTEMPTS + 1]:
        changed = "; ".join(escaped(change, 200) for change in _list(one.get("changed"))[:10])
        lines.append(
            f"{_moment(one.get('started'))} from step {escaped(one.get('step'), 20)}"
            + (f", changed: {changed}" if changed else "")
        )
    if len(listed) > _ATTEMPTS + 1:
        lines.append(f"and {count(len(listed) - _ATTEMPTS - 1)} more")
    return "<br>".join(lines) or "none"


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items())[:20] if isinstance(value, dict) else []


def findings(run: RecordedRun) -> str:
    """Verdicts during the run, anomalies, ranks that were slow."""
    anomalies = [
        [
            _figure(one, "number"),
            _figure(one, "step"),
            escaped(one.get("kind"), 40),
            escaped(one.get("policy"), 40),
            *(_figure(one, name) for name in ("loss", "grad_norm", "median")),
            _moment(one.get("time")),
        ]
        for one in run.anomalies.all()
    ]
    ranked = sorted(run.slow.items(), key=lambda item: -item[1].total)
    slow = [
        [
            str(rank),
            escaped(phase, 40),
            count(one.rows),
            share(one.total / one.rows),
            share(one.most),
            count(one.step),
        ]
        for (rank, phase), one in ranked[:10]
    ]
    body = _verdicts(run)
    heads = ["no.", "step", "kind", "policy", "loss", "gradient norm", "median loss", "time"]
    body += _listed("Anomalies", heads, anomalies, (0, 1, 4, 5, 6), run.anomalies)
    heads = ["rank", "phase", "rows", "mean cost", "largest", "at step"]
    body += _listed("Slow ranks", heads, slow, (0, 2, 3, 4, 5))
    if not run.anomalies.count:
        body += '<p class="prose">No anomalies.</p>'
    note = "A cost is a share of the wall time." if run.verdicts.count or slow else ""
    return section("Findings", body, note)


def _verdicts(run: RecordedRun) -> str:
    """Each verdict, and, of many, how often there was which."""
    every = [one for one in run.verdicts.all() if one is not run.verdict or run.verdicts.count == 1]
    rows, causes = list[list[str]](), dict[str, list[tuple[Any, str]]]()
    for one in every:
        cause, text = _told(one)
        rows.append([_figure(one, "step"), escaped(cause), _share(one.get("share")), escaped(text, 600)])
        causes.setdefault(cause, []).append((one.get("share"), text))
    listed = _listed("", ["step", "cause", "costs", "verdict"], rows, (0, 2), run.verdicts)
    if len(rows) <= _VERDICTS:
        return f"<h3>Verdicts during the run</h3>{listed}" if rows else ""
    table_rows = []
    for cause, found in sorted(causes.items(), key=lambda item: -len(item[1])):
        costs = [cost for cost, _ in found if is_number(cost) and 0 <= cost <= 1]
        mean = share(sum(costs) / len(costs)) if costs else DASH
        table_rows.append([escaped(cause), count(len(found)), mean, escaped(found[-1][1], 600)])
    heads = ["cause", "times", "mean cost", "the latest of them"]
    return (
        f"<h3>Verdicts during the run</h3>{table(heads, table_rows, (1, 2), 3)}"
        f"<details><summary>all {count(len(rows))}</summary>{listed}</details>"
    )


def _listed(
    title: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[int],
    of: Some | None = None,
) -> str:
    if not rows:
        return ""
    left_out = of.count - len(of.all()) if of else 0
    more = f'<p class="prose">{count(left_out)} between them are left out here.</p>' if left_out else ""
    heading = f"<h3>{title}</h3>" if title else ""
    return f"{heading}{table(head, rows, right, None if title else len(head) - 1)}{more}"


def _figure(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    if value is None:
        return DASH
    if not is_number(value):
        return escaped(value, 40)
    return count(value) if type(value) is int else number(value)


def _share(value: Any) -> str:
    return share(value) if is_number(value) and 0 <= value <= 1 else DASH


def checkpoints(run: RecordedRun) -> str:
    """What lies in the folder."""
    rows = [
        [
            count(one.step) + (' <span class="tag">best</span>' if one.best else ""),
            size(one.size),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(min(max(one.written, 0.0), 4e9))),
        ]
        for one in run.checkpoints[:50]
    ]
    note = "Those in the folder when this page was written; <code>trainer checkpoints</code> verifies them."
    return section("Checkpoints", table(["step", "size", "written"], rows, right=(1,)) if rows else "", note)


def cost(run: RecordedRun) -> str:
    """Joules and money."""
    found = {"energy": energy(run), "money": money(run), "per thousand samples": money_per_thousand(run)}
    rows = [[name, figure.text, figure.note] for name, figure in found.items() if figure]
    note = "Energy is what the GPUs of rank 0&rsquo;s host drew, by NVML." if found["energy"] else ""
    return section("Cost", table(["", "", ""], rows, right=(1,)) if rows else "", note)


def configuration(run: RecordedRun) -> str:
    """Every key that the run reads."""
    config = run.manifest.get("config")
    config = config if isinstance(config, dict) else {}
    every = flat(config)
    keys = [(key, value) for key, value in every.items() if is_read(config, key)]
    idle = f", and {count(len(every) - len(keys))} that it doesn&rsquo;t read" * (len(keys) < len(every))
    rows = "".join(
        f"<div><dt>{escaped(key, 80)}</dt><dd>{escaped(value, 200)}</dd></div>" for key, value in keys[:_KEYS]
    )
    body = (
        f'<details><summary>{count(len(keys))} keys{idle}</summary><dl class="config">{rows}</dl></details>'
        if rows
        else ""
    )
    return section("Configuration", body)
