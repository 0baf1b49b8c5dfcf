"""Promise P6: the report in a real browser, on a phone and on a desk, in the light and in the dark."""

import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.browser import Page, chromium, find_chromium
from tests.helpers.report_runs import alone, write_run
from trainer.runs.report.write import write_report

_PATH = find_chromium()
pytestmark = [
    pytest.mark.skipif(
        _PATH is None and os.environ.get("TRAINER_REQUIRE_BROWSER") != "1",
        reason="no Chromium here: apt-get install chromium",
    ),
    pytest.mark.xdist_group("browser"),  # it takes seconds to start
]

# What is wider than the window, unless it lies in a part that scrolls by itself.
_TOO_WIDE = """[...document.querySelectorAll('body *')]
    .filter(e => !e.closest('.scroll > *, .defs, defs, title'))
    .map(e => [e.getBoundingClientRect(), e])
    .filter(([box, e]) => box.width && (box.right > innerWidth + 0.5 || box.left < -0.5))
    .map(([box, e]) => `${e.tagName}.${e.getAttribute('class')} ${e.textContent.slice(0, 40)}`)
    .concat(document.documentElement.scrollWidth > innerWidth ? ['the page'] : [])"""

# Texts of charts that lie over each other: of the same chart, more than a pixel in both directions.
_OVER_EACH_OTHER = """[...document.querySelectorAll('svg.plot, svg.bar')].flatMap(svg => {
    const texts = [...svg.querySelectorAll('text')].map(e => [e, e.getBoundingClientRect()])
        .filter(([e, box]) => box.width);
    return texts.flatMap(([one, a], n) => texts.slice(n + 1)
        .filter(([other, b]) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
            && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3)
        .map(([other, b]) => `${one.textContent} | ${other.textContent}`));
})"""

# Contrast by WCAG 2.1 of every element with text of its own, against what is painted behind it.
_LITTLE_CONTRAST = """(() => {
    const parse = c => (c.match(/[\\d.]+/g) || []).map(Number);
    const light = c => parse(c).slice(0, 3).map(v => v / 255)
        .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, n) => sum + v * [0.2126, 0.7152, 0.0722][n], 0);
    const opaque = c => { const v = parse(c); return v.length && (v.length < 4 || v[3] > 0); };
    const behind = e => {
        for (; e; e = e.parentElement) {
            const c = getComputedStyle(e).backgroundColor;
            if (opaque(c)) return c;
        }
        return 'rgb(255, 255, 255)';
    };
    const own = e => [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    return [...document.querySelectorAll('body *')]
        .filter(e => own(e) && e.tagName !== 'title' && e.getBoundingClientRect().width)
        .map(e => {
            const style = getComputedStyle(e), svg = e instanceof SVGElement;
            const [a, b] = [svg ? style.fill : style.color, behind(e)].map(light).sort((x, y) => y - x);
            const name = `${e.tagName}.${e.getAttribute('class')} ${e.textContent.slice(0, 30)}`;
            return [(a + 0.05) / (b + 0.05), name];
        });
})()"""

_UNLABELLED = """[...document.querySelectorAll('svg.plot')].filter(svg => ['x', 'y'].some(which => {
    const label = svg.querySelector(`text.axis.${which}`);
    const box = label && label.getBoundingClientRect();
    return !box || !label.textContent.trim() || box.width < 3 || box.height < 8;
})).map(svg => svg.getAttribute('aria-label'))"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    assert _PATH is not None, "TRAINER_REQUIRE_BROWSER=1, and there is no Chromium"
    with chromium(_PATH) as page:
        yield page


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("runs")
    full, short = write_run(root / "full", leap=30), write_run(root / "short", rows=3)
    poor = write_run(root / "poor", rows=1, command="x" * 3000, notes=["y" * 500], recipe="z" * 80)
    alone(poor)
    (poor / "metrics.jsonl").write_text('{"kind": "train", "step": 50, "loss": 2.5}\n')
    made = {"one": [full], "poor": [poor], "two": [full, short], "many": [short] * 14}
    for name, folders in made.items():
        write_report(folders, root / f"{name}.html")
    return {name: root / f"{name}.html" for name in made}


def _complaints(page: Page) -> list[dict[str, Any]]:
    methods = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
    return [event for event in page.events if event.get("method") in methods]


def _requests(page: Page) -> list[str]:
    sent = [event for event in page.events if event.get("method") == "Network.requestWillBeSent"]
    return [event["params"]["request"]["url"] for event in sent]


@pytest.mark.parametrize("name", ["one", "poor", "two", "many"])
@pytest.mark.parametrize("width", [360, 768, 1440])
def test_the_report_is_readable(browser: Page, reports: dict[str, Path], name: str, width: int) -> None:
    browser.open(reports[name], width)
    assert browser.evaluate(_UNLABELLED) == []
    if name != "many":
        assert browser.evaluate(_OVER_EACH_OTHER) == []
    for scheme, paper in (("light", "rgb(253, 253, 251)"), ("dark", "rgb(20, 22, 25)")):
        browser.prefer(scheme)
        assert browser.evaluate(_TOO_WIDE) == []
        contrasts = browser.evaluate(_LITTLE_CONTRAST)
        assert len(contrasts) > 30
        assert [one for one in contrasts if one[0] < 4.5] == []
        assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == paper
    assert _complaints(browser) == []
    assert [url for url in _requests(browser) if not url.startswith("data:")] == [reports[name].as_uri()]


def test_curves_bars_and_dots_are_painted(browser: Page, reports: dict[str, Path]) -> None:
    browser.open(reports["one"], 1440)
    heights = browser.evaluate(
        "[...document.querySelectorAll('.plot path, .bar rect')].map(e => e.getBoundingClientRect())"
        ".filter(box => box.width > 1 || box.height > 1).length"
    )
    assert heights > 50
    share = browser.evaluate(
        "[...document.querySelectorAll('.bar > rect')].map(e => e.getBoundingClientRect().width)"
        ".reduce((a, b) => a + b) / document.querySelector('.bar').getBoundingClientRect().width"
    )
    assert share == pytest.approx(1, abs=0.01)
    hatch = browser.evaluate("getComputedStyle(document.querySelector('.bar .hatched rect')).fill")
    assert "#hatch" in hatch


def test_the_report_prints(browser: Page, reports: dict[str, Path]) -> None:
    browser.open(reports["one"], 1440, dark=True)
    pdf = browser.pdf()
    assert pdf.startswith(b"%PDF") and 2 <= pdf.count(b"/Type /Page\n") <= 12
    browser.call(
        "Emulation.setEmulatedMedia",
        media="print",
        features=[{"name": "prefers-color-scheme", "value": "dark"}],
    )
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    browser.call("Emulation.setEmulatedMedia", media="")


def test_a_script_in_a_run_would_not_run(browser: Page, tmp_path: Path) -> None:
    text = (
        "<script>document.title='evil'</script><img src=http://evil.invalid/x onerror=document.title='evil'>"
    )
    folder = write_run(tmp_path, rows=3, recipe=text, command=text, notes=[text])
    write_report([folder], tmp_path / "x.html")
    # Even if the escaping failed:
    page = (tmp_path / "x.html").read_text().replace("</main>", f"{text}</main>")
    (tmp_path / "x.html").write_text(page)
    browser.open(tmp_path / "x.html", 800)
    assert "evil" not in browser.evaluate("document.title").replace(text[:60], "")
    evil = [
        event["params"]["requestId"]
        for event in browser.events
        if event.get("method") == "Network.requestWillBeSent" and "evil" in event["params"]["request"]["url"]
    ]
    stopped = [
        event["params"]["requestId"]
        for event in browser.events
        if event.get("method") == "Network.loadingFailed" and event["params"].get("blockedReason") == "csp"
    ]
    assert evil and evil == stopped
    assert _complaints(browser) != []  # of the policy that stopped it


# The checks themselves: each finds what it is there for.
_BROKEN = {
    "too wide": ("</main>", "<p style='width:2000px'>x</p></main>", _TOO_WIDE),
    "no label": ('class="axis y"', 'class="y"', _UNLABELLED),
    "empty label": (">step</text>", "></text>", _UNLABELLED),
    "texts over each other": (
        'class="axis x" x="100%" y="100%" dy="32"',
        'class="axis x" x="100%" y="100%" dy="17"',
        _OVER_EACH_OTHER,
    ),
}


@pytest.mark.parametrize(("what", "instead", "check"), _BROKEN.values(), ids=_BROKEN)
def test_the_checks_can_fail(
    browser: Page, reports: dict[str, Path], tmp_path: Path, what: str, instead: str, check: str
) -> None:
    page = reports["one"].read_text()
    assert what in page
    (tmp_path / "x.html").write_text(page.replace(what, instead))
    browser.open(tmp_path / "x.html", 1440)
    assert browser.evaluate(check) != []


def test_the_checks_of_contrast_console_and_network_can_fail(
    browser: Page, reports: dict[str, Path], tmp_path: Path
) -> None:
    page = reports["one"].read_text().replace("--soft: #59616b", "--soft: #a9b1bb")
    (tmp_path / "pale.html").write_text(page)
    browser.open(tmp_path / "pale.html", 1440)
    assert min(browser.evaluate(_LITTLE_CONTRAST))[0] < 4.5
    open_page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    loud = "<script>console.error('x')</script><img src='http://127.0.0.1:9/x.png'></main>"
    (tmp_path / "loud.html").write_text(open_page.replace("</main>", loud))
    browser.open(tmp_path / "loud.html", 1440)
    assert _complaints(browser) != []
    assert "http://127.0.0.1:9/x.png" in _requests(browser)


def test_a_picture_can_be_taken(browser: Page, reports: dict[str, Path]) -> None:
    browser.open(reports["one"], 800, 600)
    png = browser.screenshot()
    assert png.startswith(b"\x89PNG") and len(zlib.compress(png)) > 10_000
