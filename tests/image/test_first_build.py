"""What publishing decides without an engine: what was tested, provenance, names."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import publish
import pytest
from publish import provenance, tags_of

from tests.helpers.refusals import refused
from trainer.errors import BadInputError

ROOT = Path(__file__).resolve().parents[2]
COMMIT, TRAIN, DEV = "a" * 40, f"sha256:{'1' * 64}", f"sha256:{'2' * 64}"
ABOUT: dict[str, Any] = {"stack": "torch2.9-cu128", "commit": COMMIT, "begun": "2026-11-26T00:00:00Z"}
ABOUT |= {"images": {"train": TRAIN, "dev": DEV}, "bases": {"debian:13": f"sha256:{'3' * 64}"}}


def test_the_dockerfile_pins_both_bases() -> None:
    """As scripts/first_build reads it, which pulls them."""
    (program,) = re.findall(r"sed -nE '(.*)' Dockerfile", (ROOT / "scripts/first_build").read_text())
    said = subprocess.check_output(["sed", "-nE", program, ROOT / "Dockerfile"], text=True)
    conda, debian = said.splitlines()
    assert conda.startswith("continuumio/miniconda3:") and debian.startswith("debian:")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A registry that has both digests; names can be added."""
    names = {f"host/trainer@{digest}": digest for digest in (TRAIN, DEV)}
    monkeypatch.setattr(publish, "digest_of", lambda ref: names.get(ref, ""))
    return names


def test_names_are_by_day_and_version_and_never_move(registry: dict[str, str]) -> None:
    begin = "host/trainer:torch2.9-cu128"
    found = tags_of(ABOUT, "host", "20261126", "v0.1.0")
    named = {"-v0.1.0": TRAIN, "-dev-v0.1.0": DEV, "-20261126": TRAIN, "-dev-20261126": DEV}
    assert found == {f"{begin}{end}": digest for end, digest in named.items()}
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


@pytest.mark.parametrize("commit", [f"{COMMIT}-dirty", "b" * 40])
def test_what_was_not_tested_here_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit: str) -> None:
    monkeypatch.setattr(publish, "FOLDER", tmp_path)
    monkeypatch.setattr(publish, "commit_of", lambda _: COMMIT)
    with refused("nothing was tested", "small.json"):
        publish.tested("small")
    file = tmp_path / "small.json"
    file.write_text(json.dumps(ABOUT))
    assert publish.tested("small") == ABOUT
    file.write_text(json.dumps({**ABOUT, "commit": commit}))
    with refused(f"tested was {commit}"):
        publish.tested("small")


def test_provenance_names_commit_bases_and_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_SOURCE", "https://host/we/trainer")
    found = provenance(ABOUT, "train")
    uris = [one["uri"] for one in found["buildDefinition"]["resolvedDependencies"]]
    assert uris[:2] == ["git+https://host/we/trainer", "docker://debian:13"]
    assert {f"file:stacks/torch2.9-cu128/{name}.lock" for name in ("conda", "wheels")} <= set(uris)
    assert found["runDetails"]["builder"]["id"]
