"""P9: known vulnerabilities of what is locked are found; one is accepted for a reason and until a day."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from audit import ALIASES, WAIVERS, Item, Waiver, audit, items, main, match, read_waivers
from locked import read_locks

ROOT = Path(__file__).resolve().parents[2]
STACKS = sorted(path.parent for path in ROOT.glob("stacks/*/stack.toml"))
HOST = "https://conda.anaconda.org"
TODAY = date(2026, 11, 21)
CONDA = f"""\
@EXPLICIT
{HOST}/conda-forge/linux-64/openssl-3.6.3-h35e630c_1.conda#{"a" * 64}
{HOST}/conda-forge/noarch/tzdata-2026c-h1_0.conda#{"b" * 64}
{HOST}/pytorch/linux-64/pytorch-2.5.1-py3.12_cuda12.4_cudnn9.1.0_0.tar.bz2#{"c" * 64}
{HOST}/nvidia/linux-64/libcurand-10.3.0.86-0.tar.bz2#{"d" * 32}
"""
WHEELS = f"""\
# groups: train dev
jinja2==3.1.2+local \\
    --hash=sha256:{"e" * 64}
# groups: test
Some_Thing==1.10.0 ; python_full_version < '3.11' \\
    --hash=sha256:{"f" * 64}
"""


@pytest.fixture
def stacks(tmp_path: Path) -> Path:
    """A folder of one stack."""
    folder = tmp_path / "stacks" / "small"
    folder.mkdir(parents=True)
    (folder / "stack.toml").write_text('[conda]\nmd5_only = ["libcurand-10.3.0.86-0.tar.bz2"]\n')
    (folder / "conda.lock").write_text(CONDA)
    (folder / "wheels.lock").write_text(WHEELS)
    return folder.parent


def osv(name: str, *events: dict[str, str], versions: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """An OSV record."""
    affected: dict[str, Any] = {"package": {"ecosystem": more.pop("ecosystem", "PyPI"), "name": name}}
    if events:
        affected["ranges"] = [{"type": "GIT", "events": [{"introduced": "0"}]}]
        affected["ranges"] += [{"type": "ECOSYSTEM", "events": list(events)}]
    if versions:
        affected["versions"] = list(versions)
    return {"id": "GHSA-1", "aliases": ["CVE-1"], "summary": "It breaks", "affected": [affected], **more}


FROM, FIXED = {"introduced": "0"}, {"fixed": "3.1.3"}
AFFECTED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a range": (osv("jinja2", FROM, FIXED), ["jinja2"]),
    "fixed in it": (osv("jinja2", FROM, {"fixed": "3.1.2"}), []),
    "introduced in it": (osv("jinja2", {"introduced": "3.1.2"}), ["jinja2"]),
    "last affected": (osv("jinja2", FROM, {"last_affected": "3.1.2"}), ["jinja2"]),
    "in the second": (osv("jinja2", FROM, {"fixed": "2"}, {"introduced": "3"}, FIXED), ["jinja2"]),
    "another ecosystem": (osv("jinja2", FROM, ecosystem="npm"), []),
    "conda's own": (osv("openssl", FROM, {"fixed": "3.6.4"}, ecosystem="conda-forge"), ["openssl"]),
    "conda's that is no Python package": (osv("openssl", FROM), []),
    "withdrawn": (osv("jinja2", FROM, withdrawn="2026-01-01T00:00:00Z"), []),
    "not to be compared": (osv("tzdata", FROM, {"fixed": "2026d"}, ecosystem="conda"), ["tzdata"]),
}


@pytest.mark.parametrize("name", AFFECTED)
def test_an_advisory_affects_the_locked_versions_that_it_names(stacks: Path, name: str) -> None:
    advisory, expected = AFFECTED[name]
    found = list(match(items(read_locks(stacks / "small")), [advisory]))
    assert [one.item.name for one in found] == expected
    assert all(bool(one.doubt) == (one.item.name == "tzdata") for one in found)


def test_a_waiver_counts_until_its_day() -> None:
    item = Item("pypi", "jinja2", "3.1.2", "wheels.lock (train)")
    advisories = [osv("jinja2", FROM, FIXED)]
    line = "GHSA-1: jinja2 3.1.2 in wheels.lock (train): It breaks (also CVE-1)"
    assert audit([item], advisories, [], TODAY) == ([line], [])
    assert audit([item], advisories, [Waiver("CVE-2", "other", TODAY)], TODAY) == ([line], [])
    for name in ("CVE-1", "GHSA-1"):
        bad, said = audit([item], advisories, [Waiver(name, "never rendered", TODAY)], TODAY)
        assert (bad, said) == ([], [f"{line}; waived until 2026-11-21: never rendered"])
    gone = Waiver("CVE-1", "never rendered", date(2026, 11, 20))
    ended = "CVE-1: the waiver expired on 2026-11-20: never rendered"
    assert audit([item], advisories, [gone], TODAY) == ([line, ended], [])
    assert audit([item], [], [gone], TODAY) == ([ended], [])


@pytest.mark.parametrize("stack", STACKS, ids=lambda path: path.name)
def test_every_stack_can_be_audited(stack: Path) -> None:
    """Its locks are read; a weak spot of PyTorch 2.5.1 is found where that is locked, and waived."""
    torch = osv("torch", FROM, {"fixed": "2.6.0"}, id="GHSA-53q9-r3pm-6pq6", aliases=["CVE-2025-32434"])
    found = items(read_locks(stack))
    assert {one.ecosystem for one in found} == {"conda", "pypi"}
    bad, said = audit(found, [torch], read_waivers(WAIVERS), TODAY)
    assert (bad, len(said)) == ([], stack.name.startswith("pytorch-cuda"))
    assert len(audit(found, [torch], [], TODAY)[0]) == len(said)
    assert {*ALIASES.values()} >= {"torch"}


def run(stacks: Path, *words: object) -> tuple[int, str]:
    """Runs the program here, so that it costs no start; returns its code and what it says."""
    said = io.StringIO()
    given = [str(word) for word in ("small", "--stacks", stacks, *words)]
    with redirect_stdout(said), redirect_stderr(said), pytest.raises(SystemExit) as end:
        main(given)
    assert isinstance(end.value.code, int)
    return end.value.code, said.getvalue()


def test_the_program(stacks: Path) -> None:
    file, waivers = stacks.parent / "osv.json", stacks.parent / "waivers.toml"
    file.write_text(json.dumps({"vulns": [osv("jinja2", FROM, FIXED)]}))
    code, out = run(stacks, "--advisories", file)
    assert (code, out.count("\n")) == (1, 2) and "GHSA-1: jinja2 3.1.2+local" in out
    assert "audit: small: 6 packages, 1 advisories: 1 fail, 0 waived\n" in out
    waivers.write_text('[[waiver]]\nid = "CVE-1"\nreason = "why"\nexpires = 2999-01-31\n')
    code, out = run(stacks, "--advisories", file, "--waivers", waivers)
    assert code == 0 and "waived until 2999-01-31: why" in out
    waivers.write_text(waivers.read_text().replace("2999", "2020"))
    code, out = run(stacks, "--advisories", file, "--waivers", waivers)
    assert code == 1 and "CVE-1: the waiver expired on 2020-01-31" in out


BAD_WAIVERS = {
    "no reason": 'id = "CVE-1"\nexpires = 2999-01-31\n',
    "a typo": 'id = "CVE-1"\nreason = "why"\nexpires = 2999-01-31\nexpire = 2999-01-31\n',
}


@pytest.mark.parametrize("name", BAD_WAIVERS)
def test_a_waiver_without_its_parts_is_refused(stacks: Path, name: str) -> None:
    file, waivers = stacks.parent / "osv.json", stacks.parent / "waivers.toml"
    file.write_text("[]")
    waivers.write_text(f"[[waiver]]\n{BAD_WAIVERS[name]}")
    code, out = run(stacks, "--advisories", file, "--waivers", waivers)
    assert (code, out.count("\n")) == (2, 1) and "waiver 1 needs id, reason and expires" in out


def test_bad_input_is_one_line(stacks: Path) -> None:
    file = stacks.parent / "osv.json"
    for text, said in {
        "": "osv.json: Expecting value",
        "{}": "no JSON list of OSV records",
        '[{"name": "x"}]': "no JSON list of OSV records",
        '[{"id": "X", "affected": [{"package": "x"}]}]': "a record that is not OSV's",
        json.dumps([osv("jinja2", {"begun": "1"})]): "a record that is not OSV's",
    }.items():
        file.write_text(text)
        code, out = run(stacks, "--advisories", file)
        assert (code, out.count("\n")) == (2, 1) and said in out, out
    for words in (["--advisories", "nowhere"], ["--advisories", file, "--waivers", "nowhere"]):
        file.write_text("[]")
        code, out = run(stacks, *words)
        assert (code, out.count("\n")) == (2, 1) and "nowhere: No such file" in out
    (stacks / "small" / "conda.lock").write_text("@EXPLICIT\nnothing\n")
    code, out = run(stacks, "--advisories", file)
    assert (code, out.count("\n")) == (2, 1) and "conda.lock: line 2" in out


@pytest.mark.parametrize(("until", "code"), [("2020-01-01", 1), ("2999-01-01", 0)])
def test_a_stack_past_its_support_fails(stacks: Path, until: str, code: int) -> None:
    about = stacks / "small/stack.toml"
    about.write_text(f"supported_until = {until}\n{about.read_text()}")
    err = io.StringIO()
    with redirect_stderr(err), redirect_stdout(io.StringIO()), pytest.raises(SystemExit) as ended:
        main(["small", "--stacks", str(stacks)])
    assert ended.value.code == code
    assert ("audit: small: supported until 2020-01-01" in err.getvalue()) == bool(code)
