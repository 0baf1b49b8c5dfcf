"""The page: one file with its style, nothing from elsewhere, nothing that runs."""

import time
from collections.abc import Sequence
from importlib.resources import files

from trainer.observe.text import count, escaped
from trainer.train.report import compare, record, sections
from trainer.train.report.figures import status
from trainer.train.report.read import RecordedRun

# By this a report is known for one: another file is never replaced by it.
MARK = '<p class="over"><span>trainer report</span>'
# Whatever were to slip through the escaping: it would not run, and nothing would be fetched.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_HATCH = (
    '<svg class="defs" width="0" height="0" aria-hidden="true"><defs>'
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<line y2="6"/></pattern></defs></svg>'
)


def page(runs: Sequence[RecordedRun]) -> str:
    """The report of a run, or of several side by side, as HTML."""
    return _one(runs[0]) if len(runs) == 1 else _several(runs)


def _one(run: RecordedRun) -> str:
    said, mood = record.verdict(run)
    name = escaped(run.manifest.get("recipe") or run.name, 80)
    parts = [
        record.what(run),
        record.model(run),
        sections.curves(run),
        sections.of_hooks(run),
        sections.time(run),
        sections.throughput(run),
        sections.memory(run),
        sections.machine(run),
        record.findings(run),
        record.checkpoints(run),
        record.cost(run),
        record.configuration(run),
    ]
    how, _ = status(run)
    head = f'<h1>{name}</h1><p class="verdict {mood}">{said}</p>{record.key_figures(run)}'
    return _shell(f"{name}, {how}", escaped(run.name, 120), head, parts, [run])


def _several(runs: Sequence[RecordedRun]) -> str:
    names = compare.names_of(runs)
    parts = [
        compare.key_figures(runs, names),
        compare.differences(runs, names),
        compare.curves(runs, names),
        compare.time(runs, names),
    ]
    recipes = list(dict.fromkeys(escaped(run.manifest.get("recipe") or run.name, 60) for run in runs))
    head = f"<h1>{count(len(runs))} runs of {', '.join(recipes[:4])}{' …' * (len(recipes) > 4)}</h1>"
    return _shell(f"{len(runs)} runs", "side by side", head, parts, runs)


def _shell(title: str, over: str, head: str, parts: Sequence[str], runs: Sequence[RecordedRun]) -> str:
    style = files("trainer.train.report").joinpath("style.css").read_text(encoding="utf-8")
    unreadable = sum(run.unreadable for run in runs)
    rows = f"{count(sum(run.rows for run in runs))} rows"
    odd = f"; {count(unreadable)} lines that can&rsquo;t be read were left out" if unreadable else ""
    now = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
        f'<link rel="icon" href="data:,"><title>{title}</title><style>\n{style}</style></head>\n'
        f"<body>{_HATCH}<main><header>{MARK} {over}</p>{head}</header>\n"
        f"{chr(10).join(part for part in parts if part)}\n"
        f"<footer>Written {now} from {rows} of metrics{odd}. Colors after Okabe and Ito, "
        "for all kinds of color vision.</footer></main></body></html>\n"
    )
