"""Promise: runs of trainer 0.1 are evaluated, exported, reported and begun from; none is trained on."""

import json
import shutil
from pathlib import Path

import pytest

from tests.helpers.forked import attempt, small
from tests.helpers.refusals import named, refusal
from trainer.cli import main
from trainer.config.dropped import DROPPED
from trainer.config.section import hash_of


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with the manifest that 0.1 wrote: format 5, and all keys that are gone since."""
    run = tmp_path_factory.mktemp("old") / "run"
    done = attempt(run, small(max_steps=2))
    assert done.code == 0, done.said
    facts = json.loads((run / "manifest.json").read_text())
    facts |= {"format": 5, "trust": {"code": ["task - 0"], "marks": ["0" * 64]}}
    for key in DROPPED:
        section, _, name = key.rpartition(".")
        (facts["config"].setdefault(section, {}) if section else facts["config"])[name] = "old"
    facts["config_hash"] = hash_of(facts["config"])
    (run / "manifest.json").write_text(json.dumps(facts))
    return run


def test_it_is_read_and_begun_from(old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["evaluate"], ["report", "--out", str(tmp_path / "new.html")]):
        assert main([words[0], str(old), *words[1:]]) == 0
        assert "config" not in capsys.readouterr().err
    done = attempt(tmp_path / "run", small(max_steps=1), source=str(old))
    assert done.code == 0, done.said


def test_it_is_not_gone_on_with(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (old / "manifest.json").read_bytes()
    done = attempt(old, small(max_steps=99), "force")
    assert done.code == 2 and named(done.line, old, "0.1")
    assert main(["verify", str(old)]) == 2
    refusal(2, capsys.readouterr().err, old, "0.1")
    assert (old / "manifest.json").read_bytes() == before


def test_checkpoints_elsewhere_are_refused_with_what_to_do(
    old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By checkpoint.folder, earlier versions made a link."""
    run, place = tmp_path / "run", tmp_path / "scratch"
    shutil.copytree(old, run)
    shutil.move(run / "checkpoints", place)
    (place / "run.json").write_text("{}")
    (run / "checkpoints").symlink_to(place)
    evaluate = ["evaluate", str(run), "--checkpoint", "last"]
    for words in (evaluate, ["runs", str(run)]):
        assert main(words) == 2
        refusal(2, capsys.readouterr().err, run / "checkpoints", place)
    assert main(["report", str(run)]) == 0
    assert named(capsys.readouterr().err, run / "checkpoints")
    (run / "checkpoints").unlink()
    shutil.move(place, run / "checkpoints")
    assert main(evaluate) == 0
