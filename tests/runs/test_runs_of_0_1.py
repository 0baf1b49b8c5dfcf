"""Promise: runs of trainer 0.1 are evaluated, exported, reported and begun from; none is trained on."""

import json
import shutil
from pathlib import Path

import pytest

from tests.helpers.commands import command, refuse
from tests.helpers.forked import attempt, small
from tests.helpers.refusals import named
from tests.helpers.run_folders import manifest
from trainer.config.dropped import DROPPED
from trainer.config.section import hash_of


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with the manifest that 0.1 wrote: format 5, and all keys that are gone since."""
    run = tmp_path_factory.mktemp("old") / "run"
    attempt(run, small(max_steps=2), code=0)
    facts = manifest(run) | {"format": 5, "trust": {"code": ["task - 0"], "marks": ["0" * 64]}}
    for key in DROPPED:
        section, _, name = key.rpartition(".")
        (facts["config"].setdefault(section, {}) if section else facts["config"])[name] = "old"
    facts["config_hash"] = hash_of(facts["config"])
    (run / "manifest.json").write_text(json.dumps(facts))
    return run


def test_it_is_read_and_begun_from(old: Path, tmp_path: Path) -> None:
    for words in (["evaluate", old], ["report", old, "--out", tmp_path / "new.html"]):
        assert "config" not in command(*words).err
    attempt(tmp_path / "run", small(max_steps=1), source=str(old), code=0)


def test_it_is_not_gone_on_with(old: Path) -> None:
    before = (old / "manifest.json").read_bytes()
    assert named(attempt(old, small(max_steps=99), "force", code=2).line, old, "0.1")
    refuse(["verify", old], old, "0.1")
    assert (old / "manifest.json").read_bytes() == before


def test_checkpoints_elsewhere_are_refused_with_what_to_do(old: Path, tmp_path: Path) -> None:
    """By checkpoint.folder, earlier versions made a link."""
    run, place = shutil.copytree(old, tmp_path / "run"), tmp_path / "scratch"
    shutil.move(run / "checkpoints", place)
    (place / "run.json").write_text("{}")
    (run / "checkpoints").symlink_to(place)
    evaluate = ["evaluate", run, "--checkpoint", "last"]
    for words in (evaluate, ["runs", run]):
        refuse(words, run / "checkpoints", place)
    assert named(command("report", run).err, run / "checkpoints")
    (run / "checkpoints").unlink()
    shutil.move(place, run / "checkpoints")
    command(*evaluate)
