"""What the first build and publishing decide without an engine: reasons of failures, log, names."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import first_build
import publish
import pytest
from bases import read_bases
from failures import explain
from publish import provenance, tags_of

from trainer.errors import BadInputError

ROOT = Path(__file__).resolve().parents[2]
COMMIT, TRAIN, DEV = "a" * 40, f"sha256:{'1' * 64}", f"sha256:{'2' * 64}"
ABOUT: dict[str, Any] = {
    "stack": "torch2.9-cu128", "commit": COMMIT, "begun": "2026-11-26T00:00:00Z",
    "images": {"train": TRAIN, "dev": DEV}, "bases": {"debian:13": f"sha256:{'3' * 64}"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ("ERROR: write /var/lib/docker/x: no space left on device", "the disk is full"),
        ("conda_env: [Errno 28] No space left on device", "the disk is full"),
        (
            "conda_env: https://h/x.conda: another file than the lock's, its sha256 differs: refused",
            "another file",
        ),
        ("  x Hash mismatch for `torch==2.9.1`", "another file"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.", "another file"),
        (
            "tls: failed to verify certificate: x509: certificate signed by unknown authority",
            "authority is unknown",
        ),
        (
            "<urlopen error [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed>",
            "authority is unknown",
        ),
        ("error: invalid peer certificate: UnknownIssuer", "authority is unknown"),
        ("toomanyrequests: You have reached your pull rate limit", "no more for now"),
        ("pull access denied for x, repository does not exist", "access is refused"),
        ("proxyconnect tcp: Proxy Authentication Required", "access is refused"),
        ("conda_env: https://h/x.conda: HTTP 404 Not Found", "gone from its server"),
        (
            "manifest for debian@sha256:1 not found: manifest unknown: manifest unknown",
            "gone from its server",
        ),
        ("dial tcp: lookup h on 1.1.1.1:53: no such host", "can't be reached"),
        ("<urlopen error [Errno -3] Temporary failure in name resolution>", "can't be reached"),
        ("dial tcp 1.1.1.1:443: i/o timeout", "can't be reached"),
        ("<urlopen error [Errno 101] Network is unreachable>", "can't be reached"),
        (
            "tls: x509: certificate has expired or is not yet valid: current time 1970-01-01",
            "dates don't hold",
        ),
        (
            "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate has expired",
            "dates don't",
        ),
        ("x509: certificate is valid for *.proxy.lan, not registry-1.docker.io", "another host's"),
        ("certificate verify failed: Hostname mismatch, certificate is not valid for 'h'", "another host's"),
        ("denied: requested access to the resource is denied", "access is refused"),
        ("unexpected status from HEAD request to https://h/v2/: 403 Forbidden", "access is refused"),
        ("HTTP status client error (404 Not Found) for url (https://h/torch/)", "gone from its server"),
        ("failed to do request: context deadline exceeded", "can't be reached"),
        ("<urlopen error [SSL: WRONG_VERSION_NUMBER] wrong version number>", "without TLS"),
        ("http: server gave HTTP response to HTTPS client", "without TLS"),
        ('Head "https://h/v2/x": remote error: tls: unrecognized name', "another host's"),
    ],
)
def test_what_programs_say_becomes_what_to_do(said: str, what: str) -> None:
    found = explain(f"something\n{said}\nERROR: failed to solve\n")
    assert what in found and said.strip() in found and "): " in found and "\n" not in found


def test_what_was_overcome_is_no_reason() -> None:
    retried = "conda_env: https://h/x: <urlopen error timed out>; again in 1 s\n"
    assert explain(retried + "fine\n" * 100 + "ERROR: exit code 3\n") == ""


def test_the_log_has_what_children_print_but_no_passwords(tmp_path: Path) -> None:
    text = "import subprocess; print('https://me:pw1@host/x ?token=pw2&a=1', flush=True)"
    out = tmp_path / "out"
    program = f"""
import sys, subprocess
from pathlib import Path
sys.path[:0] = [{str(ROOT / "scripts")!r}]
from failures import logged
with logged(Path({str(tmp_path / "log")!r})) as since:
    subprocess.run([sys.executable, "-c", {text!r}])
    Path({str(out)!r}).write_text(since())
print("after")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    line = "https://***@host/x ?token=***&a=1\n"
    assert line in done.stdout and done.stdout.endswith("after\n")
    for text in (out.read_text(), (tmp_path / "log").read_text()):
        assert line in text and "pw" not in text


def test_the_dockerfile_pins_both_bases() -> None:
    text = (ROOT / "Dockerfile").read_text()
    conda, debian = read_bases(text)
    assert conda.name.startswith("continuumio/miniconda3:") and debian.name.startswith("debian:")
    for wrong in (text.replace("@sha256:", ":", 1), text.replace("AS debian-base", "AS other", 1)):
        with pytest.raises(BadInputError, match="no conda-base and debian-base"):
            read_bases(wrong)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A registry that has both digests; names can be added."""
    names = {f"host/trainer@{digest}": digest for digest in (TRAIN, DEV)}
    monkeypatch.setattr(publish, "digest_of", lambda ref: names.get(ref, ""))
    return names


def test_names_are_by_day_and_version_and_never_move(registry: dict[str, str]) -> None:
    begin = "host/trainer:torch2.9-cu128"
    found = tags_of(ABOUT, "host", "20261126", "v0.1.0")
    assert found == {
        f"{begin}-v0.1.0": TRAIN, f"{begin}-dev-v0.1.0": DEV,
        f"{begin}-20261126": TRAIN, f"{begin}-dev-20261126": DEV,
    }  # fmt: skip
    registry |= found
    assert tags_of(ABOUT, "host", "20261126", "v0.1.0") == found
    registry[f"{begin}-dev-20261126"] = f"sha256:{'9' * 64}"  # one of the two is another's
    assert list(tags_of(ABOUT, "host", "20261126", "")) == [f"{begin}-20261126-2", f"{begin}-dev-20261126-2"]
    registry[f"{begin}-v0.1.0"] = f"sha256:{'9' * 64}"
    with pytest.raises(BadInputError, match="already and is never moved"):
        tags_of(ABOUT, "host", "20261126", "v0.1.0")
    del registry[f"host/trainer@{DEV}"]
    with pytest.raises(BadInputError, match="push first"):
        tags_of(ABOUT, "host", "20261126", "")


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"commit": f"{COMMIT}-dirty"}, "commit the changes"), ({"commit": "b" * 40}, "tested was b"),
        ({"images": {"train": TRAIN}}, "not dev and train"), ({"commit": None}, "commit"),
        ({"images": 1}, "can't be read"),
    ],
)  # fmt: skip
def test_only_what_was_tested_here_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], line: str
) -> None:
    monkeypatch.setattr(publish, "FOLDER", tmp_path)
    monkeypatch.setattr(publish, "commit_of", lambda _: COMMIT)
    with pytest.raises(BadInputError, match="nothing was tested"):
        publish.tested("small")
    file = tmp_path / "small.json"
    file.write_text(json.dumps(ABOUT))
    assert publish.tested("small") == ABOUT
    file.write_text(json.dumps({**ABOUT, **changed}))
    with pytest.raises(BadInputError, match=line):
        publish.tested("small")


def test_provenance_names_commit_bases_and_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_SOURCE", "https://host/we/trainer")
    found = provenance(ABOUT, "train")
    uris = [one["uri"] for one in found["buildDefinition"]["resolvedDependencies"]]
    assert uris[:2] == ["git+https://host/we/trainer", "docker://debian:13"]
    assert (
        "file:stacks/torch2.9-cu128/conda.lock" in uris and "file:stacks/torch2.9-cu128/wheels.lock" in uris
    )
    assert found["runDetails"]["builder"]["id"]


def test_a_base_whose_digest_is_gone_is_told_with_the_one_that_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def call(*words: str, **_: float) -> "subprocess.CompletedProcess[str]":
        gone = words[1] == "pull" and "@" in words[-1]
        return subprocess.CompletedProcess(
            words, int(gone), f"debian@{DEV}\n", "manifest unknown" if gone else ""
        )

    monkeypatch.setattr(first_build, "call", call)
    with pytest.raises(BadInputError, match=f"debian:13 is there, but no longer as {TRAIN}; it is {DEV} now"):
        first_build.pull(first_build.Base("debian:13", TRAIN, "debian-base"))
