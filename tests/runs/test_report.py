"""Promise P6: a run explains itself in one file, whatever lies in its folder."""

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.helpers.refusals import named, refusal, refused
from tests.helpers.report_runs import alone, manifest, train_row, write_run
from tests.helpers.rows import read_rows
from trainer.cli import main
from trainer.config.recipe_file import load_recipe
from trainer.errors import BadInputError
from trainer.observe import phases
from trainer.observe.charts.lines import line
from trainer.observe.rows import FILES, SPAN_OF_RATES
from trainer.observe.text import (
    share,
)
from trainer.runs.differences import flat
from trainer.runs.manifest import FORMAT
from trainer.runs.report import figures, page as page_of, write
from trainer.runs.report.phases import PHASES_EXPLAINED
from trainer.runs.report.read import read_recorded_run
from trainer.runs.report.write import leave_report, write_report

_VOID = {"meta", "link", "br", "input"}
_TAGS = {
    *("html", "head", "title", "style", "body", "main", "header", "section", "div", "p", "h1", "h2", "h3"),
    *("dl", "dt", "dd", "ul", "li", "i", "b", "span", "small", "code", "details", "summary", "footer"),
    *("table", "thead", "tbody", "tr", "th", "td", "figure", "figcaption", *_VOID),
    *("label", "svg", "defs", "pattern", "line", "g", "path", "rect", "text"),
}


class _Parsed(HTMLParser):
    """Elements, attributes and text of a page; fails where an element isn't closed."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.words = list[str](), list[tuple[str, dict[str, str | None]]](), list[str]()
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def _report(*folders: Path) -> tuple[str, _Parsed]:
    out = folders[0] / "report.html"
    write_report(folders, out)
    html = out.read_bytes().decode("utf-8", "strict")
    return html, _Parsed(html)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "full", leap=30)


def test_everything_that_a_run_says_is_there(run: Path) -> None:
    html, parsed = _report(run)
    said = "data-cpu : the GPU waits 27 % of each step: pack the data or add cores"
    assert parsed.text.index(said) < 300  # at the top
    for section in ("What was run", "Curves", "Time", "Throughput", "Memory", "Machine", "Findings"):
        assert f"<h2>{section}</h2>" in html
    for section in ("Checkpoints", "Cost", "Configuration"):
        assert f"<h2>{section}</h2>" in html
    for chart in ("Loss", "Accuracy", "Learning rate", "Gradient norm", "Samples", "Tokens", "Arithmetic"):
        assert f"<b>{chart}</b>" in html
    for chart in ("Device memory", "CPUs", "Disk", "Network", "GPU busy", "GPU power", "GPU temperature"):
        assert f"<b>{chart}</b>" in html
    for words in (
        "trainer train resnet50 --gpus 8",
        "3b71744e1252+",
        "with uncommitted changes",
        "sha256:0b56a5f0d4a5",
        "torch\u00a02.9.1+cu128",
        "8 \u00d7 NVIDIA H100; Xeon (8 ranks of 8 threads)",
        "2026-11-21 12:02:11+0000 from step 1000, changed: optim.lr: 0.5, now 0.4",
        "Why nvidia-smi shows more than is allocated.",
        "GiB in tensors, ",
        "MFU = FLOP/s \u00f7 (GPUs \u00d7 peak FLOP/s of one at this precision).",
        "sw_power_cap in 12 records",
        "2,400 best",
        "spike stop 33.1",
        "nonfinite skip nan",
        "812.4",
    ):
        assert words.replace("\u00a0", " ") in parsed.text.replace("\u00a0", " "), words
    assert len(html) < 1_000_000
    assert "3 data" in parsed.text  # the slow rank


def test_the_model_is_shown_by_its_parts(tmp_path: Path) -> None:
    row = {"block": "layer1", "kind": "3 x Bottleneck", "parameters": 215808, "trainable": 215808}
    total = {**row, "block": "all", "kind": "ResNet", "flops": None}
    model = {
        "rows": [{**row, "flops": 1.03e12, "bytes": 2621440}, "odd"],
        "total": total,
        "memory": "weights",
    }
    text = _Parsed(page_of.page([read_recorded_run(write_run(tmp_path / "run", 4, model=model))])).text
    assert "layer1 3 x Bottleneck 215,808 215,808 1.03 T 2.5 MiB" in text
    assert "all ResNet 215,808 215,808 – –" in text  # noqa: RUF001
    assert named(text, "rank weights")
    odds: list[Any] = ["x", {"rows": 5, "total": []}, {"rows": [{}]}, {}]
    for odd in odds:
        _Parsed(page_of.page([read_recorded_run(write_run(tmp_path / "odd", 4, model=odd))]))


def test_the_page_takes_nothing_from_elsewhere_and_runs_nothing(run: Path) -> None:
    html, parsed = _report(run)
    assert {tag for tag, _ in parsed.tags} <= _TAGS
    links = [value for _, have in parsed.tags for name, value in have.items() if name in ("src", "href")]
    assert links == ["data:,"]
    assert not [name for _, have in parsed.tags for name in have if name.startswith("on")]
    assert "@import" not in html and set(re.findall(r"url\(([^)]*)\)", html)) == {"#hatch"}


def test_every_chart_has_labels_and_tells_what_it_shows(run: Path) -> None:
    html, parsed = _report(run)
    plots = [have for tag, have in parsed.tags if tag == "svg" and have.get("class") == "plot"]
    assert len(plots) > 20 and all(have["role"] == "img" and have["aria-label"] for have in plots)
    assert len(re.findall(r'<text class="axis x"[^>]*>step</text>', html)) == len(plots)
    assert len(re.findall(r'<text class="axis y"[^>]*>[^<]*\S[^<]*</text>', html)) == len(plots)


def test_the_time_of_a_run_is_split_into_its_phases(run: Path) -> None:
    timed = dict(figures.totals(read_recorded_run(run)))
    assert list(timed) == [phase for phase in PHASES_EXPLAINED if phase in timed]
    assert len(timed) == len(PHASES_EXPLAINED)
    wall = sum(row["time/wall"] for row in read_rows(run, ("train",)))
    assert sum(timed.values()) == pytest.approx(wall)
    _, parsed = _report(run)
    bar = next(have["aria-label"] for tag, have in parsed.tags if (have.get("class") or "").startswith("bar"))
    assert bar is not None and f"data {share(timed['data'] / wall)}" in bar and "unexplained" in bar


def test_the_end_of_a_run_knows_its_times_best(tmp_path: Path) -> None:
    folder = write_run(tmp_path, rows=2, attempts=[{"started": "", "step": 0}])
    with (folder / "summary.jsonl").open("a") as file:
        end = {"kind": "end", "step": 100, "time/wall": 99.0, "time/forward": 60.0, "time/evaluation": 39.0}
        file.write(json.dumps(end) + "\n")
    assert figures.totals(read_recorded_run(folder)) == [("forward", 60.0), ("evaluation", 39.0)]


_HOSTILE = (
    "<script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "\x1b[31mred\x1b[0m\x1b]0;title\x07",
    "\ud800\udfff \udc80",
    "\u202eevil\u2066\u200f",
    "</style></svg><script>",
    "&lt;b&gt; \x00\x07\x9b",
    "x" * 100_000,
    "\U0001f525 \u4e2d\u6587 e\u0301",
)


@pytest.mark.parametrize("text", _HOSTILE, ids=range(len(_HOSTILE)))
def test_whatever_is_shown_is_escaped(tmp_path: Path, text: str) -> None:
    wild: dict[str, Any] = {
        "recipe": text,
        "command": text,
        "config": {text: {text: text}},
        "config_hash": text,
    }
    wild |= {"host": text, "versions": {text: text}, "device": {"gpus": [text], "cpu": text}, "notes": [text]}
    wild |= {"fingerprint": {text: text}, "commit": text, "status": text, "reason": text, "started": text}
    wild |= {
        "attempts": [{}, {"started": text, "step": text, "changed": [text]}],
        "steps": text,
        "seed": text,
    }
    folder = write_run(tmp_path / "one", rows=3, **wild)
    rows: list[dict[str, Any]] = [
        {"kind": "eval", "step": 150, text[:100]: 0.5, "accuracy": text},
        {"kind": "train", "step": 150, text[:90]: 1.0, "gpu/throttle_reason": text, "loss": text},
        {"kind": "train", "step": 150, "slow_rank": 1, "slow_phase": text, "slow_excess": 0.1},
        {"kind": "verdict", "step": 100, "cause": text, "text": text, "share": text, "final": 0},
        {"kind": "verdict", "step": 100, "cause": text, "text": text, "share": 0.5, "final": 1},
        {"kind": text, "step": 150},
    ]
    for row in rows:
        with (folder / FILES.get(str(row["kind"]), "metrics.jsonl")).open("a") as file:
            file.write(json.dumps(row) + "\n")
    anomaly = {"number": text, "step": 3, "kind": text, "policy": text, "loss": text, "time": text}
    (folder / "anomalies.jsonl").write_text(json.dumps(anomaly) + "\n")
    quiet, _ = _report(write_run(tmp_path / "quiet", rows=3))
    other = write_run(tmp_path / "two", rows=3)
    for html, parsed in (_report(folder), _report(folder, other)):
        assert {tag for tag, _ in parsed.tags} <= _TAGS
        assert not [
            name for _, have in parsed.tags for name in have if name.startswith("on") or name == "src"
        ]
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", html)
        assert len(html) < len(quiet) + 200_000


def test_secrets_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "hunter2x")
    config = {
        "data": {"path": "https://me:hunter2x@host/x"},
        "api_key": "hunter2x",
        "nested": [{"token": "hunter2x"}],
    }
    folder = write_run(
        tmp_path,
        rows=3,
        config=config,
        command="trainer train x --password hunter2x",
        reason="token=hunter2x",
    )
    with (folder / "verdicts.jsonl").open("a") as file:
        row = {"kind": "verdict", "step": 3, "final": 1, "cause": "x", "text": "s3://a:hunter2x@b is slow"}
        file.write(json.dumps(row) + "\n")
    anomaly = {"number": 1, "step": 3, "kind": "spike", "policy": "password: hunter2x"}
    (folder / "anomalies.jsonl").write_text(json.dumps(anomaly) + "\n")
    html, parsed = _report(folder)
    assert "hunter2x" not in html
    assert "https://***@host/x" in parsed.text and "is slow" in parsed.text


_ODD = {
    "no rows": None,
    "empty": b"",
    "cut off": b'{"kind": "train", "step": 5, "lo',
    "not JSON": b"garbage\n\xff\xfe\x00\n[1, 2]\n3\nnull\n\n",
    "deep": b'{"a":' * 100_000 + b"\n",
    "odd steps": b'{"kind": "train", "step": "5"}\n{"kind": "train", "step": -1}\n{"kind": "train"}\n'
    b'{"kind": "train", "step": 1e400}\n{"kind": "train", "step": true}\n',
    "odd kinds": b'{"kind": [], "step": 5}\n{"kind": {"a": 1}, "step": 6}\n{"kind": null, "step": 7}\n',
    "odd numbers": b'{"kind": "train", "step": 5, "loss": NaN, "lr": 1e999, "mfu": -Infinity, '
    b'"samples_per_s": ' + b"9" * 4000 + b', "time/wall": 0, "time/data": -1, "memory_bytes": "x"}\n',
    "huge numbers": b'{"kind": "train", "step": 999999999999999, "loss": 1e199, "mfu": 1e199, '
    b'"time/wall": 1e-190, "time/data": 1e190, "grad_norm": 5e-324, "cpu/used": -1e199}\n'
    b'{"kind": "end", "step": 1, "energy/joules": 1e199, "cost/money": -1e199}\n',
    "a huge end": b'{"kind": "end", "step": 1, "time/wall": 1e199, "time/data": 1e199}\n',
    "only null": b'{"kind": "train", "step": 5, "loss": null}\n'
    b'{"kind": "eval", "step": 5, "accuracy": null}\n',
    "a long line": b'{"kind": "train", "step": 5, "x": "'
    + b"x" * 3_000_000
    + b'"}\n{"kind": "end", "step": 7}\n',
    "many names": b'{"kind": "train", "step": 5, '
    + b", ".join(b'"n%d": 1' % n for n in range(30_000))
    + b"}\n",
    "backwards": b"".join(b'{"kind": "train", "step": %d, "loss": 1}\n' % n for n in range(50, 0, -1)),
}


@pytest.mark.parametrize("rows", _ODD.values(), ids=_ODD)
@pytest.mark.parametrize(
    "facts", [{}, {"versions": 3, "device": [], "attempts": "x", "config": [1], "notes": {}}]
)
def test_what_is_torn_or_odd_is_left_out(tmp_path: Path, rows: bytes | None, facts: dict[str, Any]) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"format": FORMAT, **facts}))
    if rows is not None:
        (tmp_path / "metrics.jsonl").write_bytes(rows)
        (tmp_path / "anomalies.jsonl").write_bytes(rows)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-00000003").write_text("no folder")
    html, _ = _report(tmp_path)
    _report(tmp_path, tmp_path)
    assert len(html) < 200_000


def test_lines_that_are_no_rows_are_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path, rows=3)
    alone(folder)
    rows = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(b"\xff\n" + rows + b'{"kind": "train"}\n{"cut')
    run = read_recorded_run(folder)
    assert (run.unreadable, run.rows) == (2, len(rows.splitlines()))
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "manifest.json").write_text("{}")
    (tmp_path / "odd" / "metrics.jsonl").write_bytes(_ODD["odd steps"] or b"")
    assert (read_recorded_run(tmp_path / "odd").unreadable, read_recorded_run(tmp_path / "odd").rows) == (
        5,
        0,
    )
    assert "2 malformed lines were left out" in _report(folder)[1].text


def test_a_spike_among_many_rows_stays_in_the_curve(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(manifest(20_000)))
    losses = [1.0 + (n % 7) / 10 + 1000 * (n == 7_777) for n in range(20_000)]
    with (tmp_path / "metrics.jsonl").open("w") as file:
        file.writelines(
            f'{{"kind": "train", "step": {n}, "loss": {loss}}}\n' for n, loss in enumerate(losses, 1)
        )
    found = read_recorded_run(tmp_path)
    assert len(found.train) <= 801
    assert max(point.cells["loss"].high for point in found.train) == max(losses)
    drawn = line("loss", found.train, "loss")
    assert len(drawn.points) <= 200 and max(cell.high for _, cell in drawn.points) == max(losses)
    html, _ = _report(tmp_path)
    assert 'class="band"' in html and len(html) < 60_000


@pytest.mark.slow
def test_a_report_of_200_000_rows_is_below_a_megabyte(tmp_path: Path) -> None:
    import random

    folder, draw = write_run(tmp_path, rows=20), random.Random(0)
    alone(folder)
    lines = [json.dumps(train_row(n, 1000, draw)) for n in range(1, 1001)]
    with (folder / "metrics.jsonl").open("w") as file:
        for thousand in range(200):
            for n, line in enumerate(lines, 1):
                at = line.index('"step": ') + 10
                file.write(f"{line[:at]}{thousand * 1000 + n}{line[line.index(',', at) :]}\n")
    html, parsed = _report(folder)
    assert len(html) < 1_000_000 and "from 200,000 metrics records" in parsed.text


def test_several_runs_stand_side_by_side(tmp_path: Path) -> None:
    one = write_run(tmp_path / "a" / "run", rows=6)
    config = {"seed": 0, "optim": {"name": "sgd", "lr": 0.1}, "log": {"to": ["jsonl"]}, "path": None}
    other = write_run(
        tmp_path / "b" / "run", rows=9, config=config, host="node18", ended="2026-11-21T10:12:04+0000"
    )
    html, parsed = _report(one, other)
    assert "2 runs of resnet50" in parsed.text and "a/run" in parsed.text and "b/run" in parsed.text
    differences = html[html.index('id="differences"') : html.index('id="curves"')]
    assert re.findall(r"<tr><td><code>(.*?)</code>", differences) == ["optim.lr", "host"]
    assert "<td>0.4</td><td>0.1</td>" in differences
    figures_ = html[html.index('id="key-figures"') : html.index('id="differences"')]
    first, second = re.findall(r"<tr style=.*?</tr>", figures_)
    assert "<b>1\u00a0h</b>" in second and "<b>8\u00a0h" not in first  # the shorter one is the better
    place = re.findall(r'id="by(\d+)"[^>]*>([^<]*)', figures_)
    wall = next(n for n, title in place if title == "Wall time")
    assert f"--by{wall}:1;" in first and f"--by{wall}:0;" in second
    assert f"#key-figures:has(#by{wall}:checked) tbody tr{{order:var(--by{wall})}}" in figures_
    loss = html[html.index("<b>Training loss</b>") :].split("</figure>")[0]
    assert 'class="c0"' in loss and 'class="c1"' in loss
    same, _ = _report(one, one)
    assert named(same, "environment")


def _chart(html: str, title: str) -> str:
    return html[html.index(f"<b>{title}</b>") :].split("</figure>", maxsplit=1)[0]


def test_equal_curves_are_seen_as_several(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"r{n}", rows=6) for n in range(3)]
    loss = _chart(_report(*folders)[0], "Training loss")
    assert re.findall(r'<g class="(c[^"]*)"', loss) == ["c0", "c1 over1", "c2 over2"]
    assert "dashed: equal to another" in loss
    other = write_run(tmp_path / "other", rows=9)
    loss = _chart(_report(folders[0], other)[0], "Training loss")
    assert re.findall(r'<g class="(c[^"]*)"', loss) == ["c0", "c1"] and "dashed:" not in loss


@pytest.mark.parametrize(("top5", "tile"), [(1.0, "100"), (1.0000001, "100"), (0.99437, "99.44"), (0.0, "0")])
def test_one_evaluation_is_shown_in_the_unit_of_its_chart(tmp_path: Path, top5: float, tile: str) -> None:
    folder = write_run(tmp_path / "run", rows=1)
    row = {"kind": "eval", "step": 50, "epoch": 1, "loss": 1.75, "top5": top5, "perplexity": 5.7}
    (folder / "evaluations.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "summary.jsonl").unlink()
    html, _ = _report(folder)
    assert f'<dt>Top-5 accuracy</dt><dd class="whole">{tile}\u00a0%</dd>' in html
    ends = {"Loss": ("0.0", "2.0"), "Top-5 accuracy": ("0", "100"), "Perplexity": ("0", "6")}
    for title, (low, high) in ends.items():
        ticks = re.findall(r'x="-8"[^>]*text-anchor="end">([^<]*)', _chart(html, title))
        assert (ticks[0], ticks[-1]) == (low, high) or (title == "Top-5 accuracy" and not top5), title
    two, _ = _report(folder, write_run(tmp_path / "other", rows=3))
    assert f"{tile}\u00a0%" in two


def test_the_configuration_is_what_the_run_reads(tmp_path: Path) -> None:
    config = load_recipe("digits", []).model_dump(mode="json")
    html, parsed = _report(write_run(tmp_path, rows=3, config=config))
    keys = re.findall(r"<dt>([a-z_.0-9]+)</dt>", html[html.index('<dl class="config">') :])
    assert {"optim.lr", "data.name", "seed", "regularization.mixup"} <= {*keys}
    assert not [key for key in keys if key.startswith(("language.", "audio.", "detection."))]
    assert "optim.momentum" in keys or "optim.betas" in keys
    hidden = len(flat(config)) - len(keys)
    assert hidden > 20 and named(parsed.text, f"{len(keys)} {hidden}")


def test_of_many_runs_the_later_ones_are_dashed(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"r{n}", rows=3) for n in range(14)]
    html, _ = _report(*folders)
    assert 'class="c6 dashed"' in html and len(html) < 1_000_000
    with pytest.raises(BadInputError, match="15 runs: a report shows 1 to 14"):
        write_report([*folders, folders[0]], tmp_path / "x.html")


def test_the_command_says_where_it_wrote(run: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.startswith(f"{run / 'report.html'} (")
    write_run(tmp_path / "other")
    assert main(["report", str(run), "other"]) == 0
    assert capsys.readouterr().out.startswith("report.html (") and (tmp_path / "report.html").exists()
    for _ in range(2):  # a report is written anew
        assert main(["report", str(run), "--out", "x.html"]) == 0
        assert main(["report", str(run)]) == 0
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_bad_input_is_one_line(run: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "manifest.json").write_text('{"recipe"')
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "manifest.json").write_text("[]")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "manifest.json").write_text('{"config":' + "[" * 900 + "]" * 900 + "}")
    (tmp_path / "empty").mkdir()
    cases = [
        (["empty"], "folder"),
        (["no/such"], "no/such"),
        ([str(run), "empty"], "folder"),
        (["torn"], "torn/manifest.json JSON"),
        (["list"], "list/manifest.json JSON"),
        (["deep"], "deep manifest"),
        ([str(run), "--out", "empty"], "--out"),
        (
            [str(run), "--out", "list/manifest.json"],
            "list/manifest.json",
        ),
        ([str(run), "--out", "no/such/x.html"], "no/such/x.html"),
    ]
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)  # Python's own: a library that another test imported may have raised it
    try:
        for arguments, wanted in cases:
            assert main(["report", *arguments]) == 2
            told = capsys.readouterr()
            assert named(told.err, wanted) and told.err.count("\n") == 1 and told.out == ""
    finally:
        sys.setrecursionlimit(before)
    assert not (tmp_path / "report.html").exists()


def test_a_run_given_twice_or_by_a_link_is_reported_once(run: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """`runs/*` has the link `latest`."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "other")
    shutil.copytree(run, tmp_path / "runs" / "full")
    (tmp_path / "runs" / "latest").symlink_to("full")
    for given in (["runs/latest", "runs/full", "runs/other"], ["runs/full", "runs/latest", "runs/other"]):
        assert main(["report", *given, "--out", "report.html"]) == 0
        shown = Path("report.html").read_text()
        assert shown.count(">full<") and not shown.count(">latest<")
    (tmp_path / "report.html").unlink()
    assert main(["report", "runs/full", "runs/../runs/full"]) == 0
    assert not (tmp_path / "report.html").exists() and (tmp_path / "runs" / "full" / "report.html").exists()


def test_a_comparison_does_not_replace_another(
    run: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "other")
    assert main(["report", str(run), "other"]) == 0
    before = (tmp_path / "report.html").read_bytes()
    assert main(["report", "other", str(run)]) == 2
    assert named(capsys.readouterr().err, "report.html --out FILE")
    assert (tmp_path / "report.html").read_bytes() == before
    assert main(["report", "other", str(run), "--out", "report.html"]) == 0


def test_the_end_of_a_training_does_not_fail_for_its_report(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    leave_report(tmp_path / "none")
    assert capsys.readouterr().err.startswith("trainer: no report was written (")
    folder = write_run(tmp_path / "run", rows=3)
    leave_report(folder)
    assert (folder / "report.html").exists() and capsys.readouterr().err == ""
    monkeypatch.setattr(write, "_QUICK", 100)
    leave_report(folder)
    assert "takes its time" in capsys.readouterr().err

    def broken(_: object) -> str:
        raise KeyError("https://me:hunter2@host\nand more")

    monkeypatch.setattr(write, "_QUICK", 1 << 30)
    monkeypatch.setattr(page_of, "page", broken)
    leave_report(folder)
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "hunter2" not in told


def test_a_report_that_can_never_be_written_is_refused_before_records_are_read(
    run: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr("trainer.runs.report.write.read_recorded_run", mock.Mock(side_effect=AssertionError))
    assert main(["report", str(run), "--out", "no/such/x.html"]) == 2
    refusal(2, capsys.readouterr().err, "no/such/x.html")


def test_a_report_is_replaced_in_one_move(tmp_path: Path, monkeypatch: Any) -> None:
    folder, out = write_run(tmp_path / "run", rows=3), tmp_path / "report.html"
    out.write_text("the one before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with refused():
        write_report([folder], out)
    assert out.read_text() == "the one before" and len(list(tmp_path.iterdir())) == 2


def test_a_run_that_goes_on_or_failed_says_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path, rows=3, status="running", ended=None)
    (folder / "summary.jsonl").unlink()
    rows = (folder / "verdicts.jsonl").read_text().splitlines()
    early = [row for row in rows if '"final": 1' not in row]
    (folder / "verdicts.jsonl").write_text("\n".join(early) + "\n")
    assert named(_report(folder)[1].text, "GPU 27")
    for status in ("failed", "diverged"):
        facts = manifest(3, status=status, reason="RuntimeError: out of memory")
        (folder / "manifest.json").write_text(json.dumps(facts))
        assert named(_report(folder)[1].text, f"{status} RuntimeError")


def test_the_report_needs_no_torch() -> None:
    code = "import sys, trainer.runs.report.write; sys.exit(bool({'torch', 'numpy'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=300).returncode == 0


# Machado, Oliveira, Fernandes 2009, severity 1.0: what people see whose cones for red, green or blue fail.
_VISION = {
    "all": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.01182, 0.04294, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.3039],
    ],
}


def _linear(color: str) -> Any:
    values = np.array([int(color[n : n + 2], 16) for n in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def _lab(linear: Any) -> Any:
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(to_xyz) @ np.clip(linear, 0, 1) / [0.9505, 1, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def _contrast(one: str, other: str) -> float:
    light = sorted(float(_linear(color) @ [0.2126, 0.7152, 0.0722]) for color in (one, other))
    return (light[1] + 0.05) / (light[0] + 0.05)


def _palettes() -> list[dict[str, str]]:
    style = (Path(page_of.__file__).parent / "templates/style.css").read_text()
    found = [
        dict(re.findall(r"--([a-z0-9]+): (#[0-9a-f]{6});", part)) for part in style.split("@media", 2)[:2]
    ]
    assert all(len(palette) >= 26 for palette in found)
    return found


@pytest.mark.parametrize("palette", _palettes(), ids=["light", "dark"])
def test_the_colors_can_be_told_apart_by_all(palette: dict[str, str]) -> None:
    for text in ("ink", "soft", "good", "bad"):
        assert _contrast(palette[text], palette["paper"]) >= 4.5
    curves = [palette[f"c{n}"] for n in range(7)]
    for color in curves:
        assert _contrast(color, palette["paper"]) >= 2.8
    stacked = [palette[phase] for phase in PHASES_EXPLAINED]
    for kind, matrix in _VISION.items():

        def apart(one: str, other: str, matrix: Any = matrix) -> float:
            seen = [_lab(np.array(matrix) @ _linear(color)) for color in (one, other)]
            return float(np.linalg.norm(seen[0] - seen[1]))

        for one, other in combinations(curves[:4], 2):
            assert apart(one, other) > 15, (kind, one, other)
        for one, other in combinations(curves, 2):
            assert apart(one, other) > 8, (kind, one, other)
        for one, other in pairwise(stacked):
            assert apart(one, other) > 15, (kind, one, other)


def test_every_phase_of_a_run_has_its_words() -> None:
    assert {*phases.PHASES, "unexplained"} == set(PHASES_EXPLAINED)


UNEVEN = [(100, 8.0, 10.0), (1, 0.01, 1.0), (99, 7.0, 9.0), (2, 0.3, 4.0), (98, 7.5, 8.0), (3, 0.02, 5.0)]
SPANS = {"seconds": 1, "time/wall": 2}
SPEEDS = ("samples_per_s", "tokens_per_s", "flops_per_s", "mfu")  # others are of the whole wall time


def uneven_run(
    folder: Path, repeats: int = 1, without: tuple[str, ...] = (), **end: Any
) -> tuple[Path, dict[str, Any]]:
    """A run whose records have each rate and cover unlike spans; and what is right for each rate."""
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps(manifest(303)))
    draw, step, lines = np.random.default_rng(0), 0, []
    sums = {rate.name: [0.0, 0.0] for rate in figures.RATES}
    for record in UNEVEN * repeats:  # steps, seconds, wall time
        step += record[0]
        row: dict[str, Any] = {"kind": "train", "step": step, "seconds": record[1], "time/wall": record[2]}
        for span in without:
            del row[span]
        spans = [record[SPANS[name]] for name in ("seconds", "time/wall") if name in row] or [record[0]]
        for name, sum_ in sums.items():
            row[name] = float(draw.random()) * (1 if record[0] > 50 else 1000)
            wanted = 1 if name in SPEEDS else 2
            weight = spans[0] if len(spans) == 1 else record[wanted]
            sum_[0], sum_[1] = sum_[0] + row[name] * weight, sum_[1] + weight
        lines.append(json.dumps(row) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    if end:
        (folder / "summary.jsonl").write_text(json.dumps({"kind": "end", "step": step, **end}) + "\n")
    return folder, {name: total / span for name, (total, span) in sums.items()}


@pytest.mark.parametrize("repeats", [1, 700], ids=["six", "thinned"])
@pytest.mark.parametrize("without", [(), ("seconds",), ("time/wall",), ("seconds", "time/wall")])
def test_a_rate_is_a_total_over_a_time(without: tuple[str, ...], repeats: int, tmp_path: Path) -> None:
    folder, right = uneven_run(tmp_path / "run", repeats, without)
    run = read_recorded_run(folder)
    assert len(run.train) <= 801
    for rate in figures.RATES:
        shown = rate.of(run)
        assert shown is not None and shown.value == pytest.approx(right[rate.name]), rate.name
    by_title = {kind.name: kind for kind in figures.KEY_FIGURES}
    assert all(by_title[rate.title].of(run) == rate.of(run) for rate in figures.RATES)


def test_a_rate_of_the_whole_run_is_that_of_its_end(tmp_path: Path) -> None:
    folder, right = uneven_run(tmp_path / "run", samples_per_s=7.0)
    run = read_recorded_run(folder)
    shown = {rate.name: rate.of(run) for rate in figures.RATES}
    assert shown.pop("samples_per_s")[0] == 7.0  # type: ignore[index]
    assert all(one and one.value == pytest.approx(right[name]) for name, one in shown.items())


def test_what_records_say_of_a_span_is_a_rate() -> None:
    """Every figure of a record is a total, a value of its moment, or has its span in the table."""
    import random

    moments = ("time/", "energy/", "memory/")  # totals, totals, and the memory of that moment
    others = {
        "kind",
        "step",
        "epoch",
        "lr",
        "updates",
        "grad_norm",
        "memory_bytes",
        "seconds",
        "slow_rank",
        "slow_phase",
    }
    for n in range(1, 101):
        for name in train_row(n, 100, random.Random(n)).keys() - others:
            head, slash, _ = name.partition("/")
            assert name.startswith(moments) or head + slash in SPAN_OF_RATES, name
    assert {rate.name.partition("/")[0] + "/" * ("/" in rate.name) for rate in figures.RATES} <= {
        *SPAN_OF_RATES
    }


def test_a_run_without_records_or_with_one(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for facts in (manifest(60), {**{k: v for k, v in manifest(60).items() if "steps" not in k}, "steps": 60}):
        (empty / "manifest.json").write_text(json.dumps(facts))
        run = read_recorded_run(empty)
        assert [rate.of(run) for rate in figures.RATES] == [None] * len(figures.RATES)
        assert figures.end_step(run) == 60 and "0 of 60" in _report(empty)[1].text
    row = {"kind": "train", "step": 1, "loss": 1.0, "cpu/used": 2.0, "time/wall": 0.0, "flops_per_s": None}
    (empty / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    shown = {rate.name: rate.of(read_recorded_run(empty)) for rate in figures.RATES}
    assert {name for name, one in shown.items() if one} == {"cpu/used"}
    assert "1 of 60" in _report(empty)[1].text


def test_the_slowest_rank_costs_time_and_not_records(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(manifest(100)))
    slow = {"kind": "train", "slow_rank": 3, "slow_phase": "data"}
    rows = [
        {**slow, "step": 99, "time/wall": 99.0, "slow_excess": 0.1},
        {**slow, "step": 100, "time/wall": 1.0, "slow_excess": 0.9},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (found,) = read_recorded_run(tmp_path).slow.values()
    assert found.rows == 2 and found.seconds / found.wall == pytest.approx(0.108)


def test_the_result_is_the_headline(tmp_path: Path) -> None:
    run = read_recorded_run(write_run(tmp_path / "run", 4))
    html = page_of.page([run])
    first = figures.metrics(run)[0]
    (headline,) = re.findall(r'<h1>.*?<span class="result">(.*?)</span></h1>', html)
    assert headline.startswith(figures.metric_title(first)) and figures.metric_title("map_50") == "mAP@50"
