"""Promise P6: a run explains itself in one file, whatever lies in its folder."""

import json
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import planted
from tests.helpers.commands import command, refuse
from tests.helpers.programs import ran
from tests.helpers.report_runs import manifest, write_run
from tests.helpers.rows import read_rows
from trainer.observe.rows import FILES
from trainer.observe.text import share
from trainer.runs.manifest import FORMAT
from trainer.runs.report import figures, page as page_of, write
from trainer.runs.report.charts import line
from trainer.runs.report.figures import PHASES_EXPLAINED
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


def _add(folder: Path, *rows: dict[str, Any]) -> None:
    """Rows, each in its file."""
    for row in rows:
        with (folder / FILES.get(str(row["kind"]), "metrics.jsonl")).open("a") as file:
            file.write(json.dumps(row) + "\n")


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
    for section in ("What was run", "Curves", "Time", "Throughput", "Memory", "Machine", "Findings"):
        assert f"<h2>{section}</h2>" in html
    for chart in ("Loss", "Accuracy", "Learning rate", "Device memory", "CPUs", "Disk", "GPU power"):
        assert f"<b>{chart}</b>" in html
    for word in ("27 %", "resnet50", "3b71744e1252+", "sw_power_cap", "812.4"):
        assert word in parsed.text, word


def test_the_page_takes_nothing_from_elsewhere_and_runs_nothing(run: Path) -> None:
    html, parsed = _report(run)
    assert {tag for tag, _ in parsed.tags} <= _TAGS
    links = [value for _, have in parsed.tags for name, value in have.items() if name in ("src", "href")]
    assert links == ["data:,"]
    assert not [name for _, have in parsed.tags for name in have if name.startswith("on")]
    assert "@import" not in html and set(re.findall(r"url\(([^)]*)\)", html)) == {"#hatch"}


def test_the_time_of_a_run_is_split_into_its_phases(run: Path) -> None:
    timed = dict(figures.totals(read_recorded_run(run)))
    assert list(timed) == [phase for phase in PHASES_EXPLAINED if phase in timed]
    assert len(timed) == len(PHASES_EXPLAINED)
    (wall,) = [row["time/wall"] for row in read_rows(run, ("end",))]  # of both attempts
    assert sum(timed.values()) == pytest.approx(wall)
    _, parsed = _report(run)
    bar = next(have["aria-label"] for tag, have in parsed.tags if (have.get("class") or "").startswith("bar"))
    assert bar is not None and f"data {share(timed['data'] / wall)}" in bar and "unexplained" in bar


def test_whatever_is_shown_is_escaped(tmp_path: Path) -> None:
    text = (
        "\"'><img src=x onerror=alert(1)></style></svg><script>\x1b[31mred\x1b[0m\x1b]0;title\x07\u202eevil"
    )
    text += "\u2066\u200f &lt;b&gt; \x00\x07\x9b\ud800\udfff \udc80" + "x" * 100_000
    keys = ("recipe", "command", "config_hash", "host", "commit", "status", "reason", "started", "seed")
    one = {text: text}
    wild: dict[str, Any] = {**dict.fromkeys(keys, text), "device": {"gpus": [text], "cpu": text}}
    wild |= {"config": {text: one}, "versions": one, "fingerprint": one, "notes": [text]}
    wild["attempts"] = [{}, {"started": text, "step": text, "changed": [text]}]
    folder = write_run(tmp_path / "one", rows=3, **wild)
    verdict = {"kind": "verdict", "step": 100, "cause": text, "text": text}
    _add(
        folder,
        {"kind": "eval", "step": 150, text[:100]: 0.5, "accuracy": text},
        {"kind": "train", "step": 150, text[:90]: 1.0, "gpu/throttle_reason": text, "loss": text},
        {"kind": "train", "step": 150, "slow_rank": 1, "slow_phase": text, "slow_excess": 0.1},
        {**verdict, "share": text, "final": 0},
        {**verdict, "share": 0.5, "final": 1},
        {"kind": text, "step": 150},
    )
    anomaly = {"number": text, "step": 3, "kind": text, "policy": text, "loss": text, "time": text}
    (folder / "anomalies.jsonl").write_text(json.dumps(anomaly) + "\n")
    quiet, _ = _report(write_run(tmp_path / "quiet", rows=3))
    other = write_run(tmp_path / "two", rows=3)
    for html, parsed in (_report(folder), _report(folder, other)):
        assert {tag for tag, _ in parsed.tags} <= _TAGS
        names = {name for _, have in parsed.tags for name in have}
        assert not [name for name in names if name.startswith("on") or name == "src"]
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", html)
        assert len(html) < len(quiet) + 200_000


def test_secrets_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "hunter2x")
    config: dict[str, Any] = {"api_key": "hunter2x", "nested": [{"token": "hunter2x"}]}
    config["data"] = {"path": "https://me:hunter2x@host/x"}
    asked = "trainer train x --password hunter2x"
    folder = write_run(tmp_path, rows=3, config=config, command=asked, reason="token=hunter2x")
    text = "s3://a:hunter2x@b is slow"
    _add(folder, {"kind": "verdict", "step": 3, "final": 1, "cause": "x", "text": text})
    anomaly = {"number": 1, "step": 3, "kind": "spike", "policy": "password: hunter2x"}
    (folder / "anomalies.jsonl").write_text(json.dumps(anomaly) + "\n")
    html, parsed = _report(folder)
    assert "hunter2x" not in html
    assert "https://***@host/x" in parsed.text and "is slow" in parsed.text


_ODD = {
    "not JSON": (b"garbage\n\xff\xfe\x00\n[1, 2]\n3\nnull\n\n" + b'{"a":' * 100_000 + b"\n", 2 * 7),
    "odd steps": (
        b'{"kind": "train", "step": "5"}\n{"kind": "train", "step": -1}\n{"kind": "train"}\n'
        b'{"kind": "train", "step": 1e400}\n{"kind": "train", "step": true}\n{"cut',
        5,
    ),
    "odd numbers": (
        b'{"kind": [], "step": 5}\n{"kind": "train", "step": 5, "loss": NaN, "lr": 1e999, "samples_per_s": '
        + b"9" * 4000
        + b', "time/wall": 0, "time/data": -1, "memory_bytes": "x"}\n',
        0,
    ),
}


@pytest.mark.parametrize(("rows", "unreadable"), _ODD.values(), ids=_ODD)
def test_what_is_torn_or_odd_is_left_out_and_counted(tmp_path: Path, rows: bytes, unreadable: int) -> None:
    facts = {"versions": 3, "device": [], "attempts": "x", "config": [1], "notes": {}}
    (tmp_path / "manifest.json").write_text(json.dumps({"format": FORMAT, **facts}))
    for name in ("metrics.jsonl", "anomalies.jsonl"):
        (tmp_path / name).write_bytes(rows)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-00000003").write_text("no folder")
    html, _ = _report(tmp_path)
    _report(tmp_path, tmp_path)
    assert len(html) < 200_000
    assert read_recorded_run(tmp_path).unreadable == unreadable


def test_a_spike_among_many_rows_stays_in_the_curve(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(manifest(20_000)))
    losses = [1.0 + (n % 7) / 10 + 1000 * (n == 7_777) for n in range(20_000)]
    rows = [f'{{"kind": "train", "step": {n}, "loss": {loss}}}\n' for n, loss in enumerate(losses, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(rows))
    found = read_recorded_run(tmp_path)
    assert len(found.train) <= 801
    assert max(point.cells["loss"].high for point in found.train) == max(losses)
    drawn = line("loss", found.train, "loss")
    assert len(drawn.points) <= 200 and max(cell.high for _, cell in drawn.points) == max(losses)
    html, _ = _report(tmp_path)
    assert 'class="band"' in html and len(html) < 60_000


def test_bad_input_is_one_line(run: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    planted.write(tmp_path, {"torn/manifest.json": '{"recipe"', "list/manifest.json": "[]"})
    (tmp_path / "empty").mkdir()
    refuse(["report", run, "empty"], "folder")
    refuse("report no/such", "no/such")
    refuse("report torn", "torn/manifest.json")
    refuse(["report", run, "--out", "empty"], "--out")
    refuse(["report", run, "--out", "list/manifest.json"], "list/manifest.json")
    assert not (tmp_path / "report.html").exists()


def test_a_run_given_twice_or_by_a_link_is_reported_once(run: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """`runs/*` has the link `latest`."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "other")
    shutil.copytree(run, tmp_path / "runs" / "full")
    (tmp_path / "runs" / "latest").symlink_to("full")
    command("report", "runs/latest", "runs/full", "runs/other", "--out", "report.html")
    shown = Path("report.html").read_text()
    assert shown.count(">full<") and not shown.count(">latest<")
    (tmp_path / "report.html").unlink()
    command("report", "runs/full", "runs/../runs/full")
    assert not (tmp_path / "report.html").exists() and (tmp_path / "runs" / "full" / "report.html").exists()


def test_the_end_of_a_run_does_not_fail_for_its_report(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
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


def test_the_report_needs_no_torch() -> None:
    code = "import sys, trainer.runs.report.write; sys.exit(bool({'torch', 'numpy'} & {*sys.modules}))"
    ran(sys.executable, "-c", code, code=0)


UNEVEN = [(100, 8.0, 10.0), (1, 0.01, 1.0), (99, 7.0, 9.0), (2, 0.3, 4.0), (98, 7.5, 8.0), (3, 0.02, 5.0)]
SPANS = {"seconds": 1, "time/wall": 2}
SPEEDS = ("samples_per_s", "tokens_per_s", "flops_per_s", "mfu")  # others are of the whole wall time


@pytest.mark.parametrize(
    ("without", "repeats"), [((), 700), (("seconds",), 1), (("seconds", "time/wall"), 1)]
)
def test_a_rate_is_a_total_over_a_time(without: tuple[str, ...], repeats: int, tmp_path: Path) -> None:
    """Of a run whose records have each rate and cover unlike spans."""
    (tmp_path / "manifest.json").write_text(json.dumps(manifest(303)))
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
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    right = {name: total / span for name, (total, span) in sums.items()}
    run = read_recorded_run(tmp_path)
    assert len(run.train) <= 801
    for rate in figures.RATES:
        shown = rate.of(run)
        assert shown is not None and shown.value == pytest.approx(right[rate.name]), rate.name
    by_title = {kind.name: kind for kind in figures.KEY_FIGURES}
    assert all(by_title[rate.title].of(run) == rate.of(run) for rate in figures.RATES)
