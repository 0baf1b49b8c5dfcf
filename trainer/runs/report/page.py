"""Page: one file that includes its style, without external resources or scripts."""

import time
from collections.abc import Sequence

from markupsafe import Markup

from trainer.observe.text import count, plain
from trainer.runs.report import compare, record, sections
from trainer.runs.report.evaluation import evaluation
from trainer.runs.report.figures import result, status
from trainer.runs.report.parts import html, templates
from trainer.runs.report.read import RecordedRun

# Mark by which a report is recognized: files without it are never overwritten.
MARK = '<p class="over"><span>trainer report</span>'


def page(runs: Sequence[RecordedRun]) -> str:
    """Returns the report of a run, or of several side by side, as HTML."""
    content = _one(runs[0]) if len(runs) == 1 else _several(runs)
    return templates.get_template("page.html").render(
        **content,
        mark=Markup(MARK),
        now=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        rows=sum(run.rows for run in runs),
        unreadable=sum(run.unreadable for run in runs),
    )


def _one(run: RecordedRun) -> dict[str, object]:
    name = plain(run.manifest.get("recipe") or run.name, 80)
    parts = [
        record.what(run),
        record.model(run),
        sections.curves(run),
        evaluation(run),
        sections.answer_table(run),
        sections.of_hooks(run),
        sections.time(run),
        sections.throughput(run),
        sections.memory_charts(run),
        sections.machine(run),
        record.findings(run),
        html("record.checkpoints", run.checkpoints),
        record.cost(run),
        record.configuration(run),
    ]
    head = html("record.head", name, result(run), *record.verdict(run), record.key_figures(run))
    return {"title": f"{name}, {status(run)[0]}", "over": plain(run.name, 120), "head": head, "parts": parts}


def _several(runs: Sequence[RecordedRun]) -> dict[str, object]:
    names = compare.run_names(runs)
    parts = [
        compare.key_figure_table(runs, names),
        compare.differing(runs, names),
        compare.curves_of_runs(runs, names),
        compare.times(runs, names),
    ]
    recipes = list(dict.fromkeys(plain(run.manifest.get("recipe") or run.name, 60) for run in runs))
    listed = f"{count(len(runs))} runs of {', '.join(recipes[:4])}{' …' * (len(recipes) > 4)}"
    head = Markup("<h1>{}</h1>").format(listed)
    return {"title": f"{len(runs)} runs", "over": "side by side", "head": head, "parts": parts}
