"""Promise P6: the report in a real browser, on a phone and on a desk, in the light and in the dark."""

import os
from collections.abc import Iterator
from pathlib import Path

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
    made = {"poor": [poor], "two": [full, short], "many": [short] * 14}
    for name, folders in made.items():
        write_report(folders, root / f"{name}.html")
    return {name: root / f"{name}.html" for name in made}


def _requests(page: Page) -> list[str]:
    sent = [event for event in page.events if event.get("method") == "Network.requestWillBeSent"]
    return [event["params"]["request"]["url"] for event in sent]


@pytest.mark.parametrize(("name", "width"), [("poor", 360), ("two", 768), ("many", 1440)])
def test_the_report_is_readable(browser: Page, reports: dict[str, Path], name: str, width: int) -> None:
    browser.open(reports[name], width)
    for scheme, paper in (("light", "rgb(253, 253, 251)"), ("dark", "rgb(20, 22, 25)")):
        browser.prefer(scheme)
        assert browser.evaluate(_TOO_WIDE) == []
        contrasts = browser.evaluate(_LITTLE_CONTRAST)
        assert len(contrasts) > 30
        assert [one for one in contrasts if one[0] < 4.5] == []
        assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == paper
    complaints = {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}
    assert not complaints & {event.get("method") for event in browser.events}
    assert [url for url in _requests(browser) if not url.startswith("data:")] == [reports[name].as_uri()]


def test_a_script_in_a_run_would_not_run(browser: Page, tmp_path: Path) -> None:
    """Even if the escaping failed: the page's own policy stops it."""
    text = (
        "<script>document.title='evil'</script><img src=http://evil.invalid/x onerror=document.title='evil'>"
    )
    write_report([write_run(tmp_path, rows=3)], tmp_path / "x.html")
    page = (tmp_path / "x.html").read_text().replace("</main>", f"{text}</main>")
    (tmp_path / "x.html").write_text(page)
    browser.open(tmp_path / "x.html", 800)
    assert "evil" not in browser.evaluate("document.title")
    failed = [event["params"] for event in browser.events if event.get("method") == "Network.loadingFailed"]
    assert any("evil" in url for url in _requests(browser))
    assert "csp" in {one.get("blockedReason") for one in failed}
