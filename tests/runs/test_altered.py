"""Promise: a flipped byte in what a run left is named; a run that ended doesn't stand there as running."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import command
from tests.helpers.forked import attempt, replace
from tests.helpers.marked import flip
from tests.helpers.refusals import named
from tests.helpers.run_folders import held
from trainer.commands.verify.recorded import read_recorded
from trainer.commands.verify.verify import altered_files
from trainer.host import files
from trainer.runs import folder as run_folder
from trainer.runs.folder import is_abandoned
from trainer.runs.manifest import Manifest, read_facts, update_manifest
from trainer.train import recording


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "run")


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "full")


def _flipped(path: Path) -> None:
    flip(path, path.stat().st_size // 2, 0)  # a digit stays a digit: the line can still be read


def test_a_flipped_byte_is_named_wherever_it_is(whole: Path, folder: Path) -> None:
    assert list(altered_files(read_recorded(whole))) == []
    names = {path.name for path in whole.iterdir() if path.is_file() and path.stat().st_size}
    names -= {".lock", "report.html", "manifest.json", "config.yaml"}
    assert {"memory.jsonl", "verdicts.jsonl", "summary.jsonl", "ema.safetensors", "checksums.jsonl"} <= names
    for name in sorted(names):
        _flipped(folder / name)
        assert any(name in line for line in altered_files(read_recorded(folder))), name
        shutil.copy(whole / name, folder)


def test_commands_say_what_isnt_what_the_run_wrote(folder: Path) -> None:
    _flipped(folder / "memory.jsonl")
    facts = read_facts(folder)
    facts["config"]["data"]["eval_batch_size"] = 7
    (folder / "manifest.json").write_text(json.dumps(facts))
    for name in ("report", "evaluate"):
        said = command(name, folder).err
        assert named(said, "hash config")
        assert named(said, "memory.jsonl") == (name == "report")
    _flipped(next((folder / "checkpoints").rglob("optimizer.safetensors")))
    command("runs", folder, code=1)


def test_a_status_is_written_where_no_file_can_be(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {**read_facts(folder), "status": "running"}
    run_folder.write_json(folder / "manifest.json", facts)
    monkeypatch.setattr(files, "_make", full)
    for status, wanted in (("diverged", "failed"), ("stopped", "failed")):  # the first stays
        with pytest.raises(OSError, match="full"):
            update_manifest(folder, Manifest.model_validate(facts), status=status, reason="why")
        assert read_facts(folder) == {**facts, "status": wanted}


def test_a_manifest_that_leads_elsewhere_isnt_overwritten(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    victim = tmp_path / "victim"
    (folder / "manifest.json").rename(victim)
    victim.write_text(victim.read_text().replace('"status": "finished"', '"status": "running"'))
    (folder / "manifest.json").symlink_to(victim)
    before = victim.read_bytes()
    monkeypatch.setattr(files, "_make", full)
    with pytest.raises(OSError, match="full"):
        update_manifest(folder, Manifest.model_validate_json(before), status="failed", reason="why")
    assert victim.read_bytes() == before
    assert "its status stays running" in capsys.readouterr().err


def _stale_configuration() -> None:
    written = files.written_whole

    def stale(path: Path, *more: Any) -> Any:
        if path.name == "config.yaml":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return written(path, *more)

    replace(recording, "written_whole", stale)


def test_a_folder_that_fails_at_the_start_isnt_running(tmp_path: Path) -> None:
    assert "config.yaml" in attempt(tmp_path / "run", before=_stale_configuration, code=2).line
    assert read_facts(tmp_path / "run")["status"] == "failed"
    attempt(tmp_path / "run", code=0)


def test_a_run_that_nobody_holds_ended_without_saying_so(folder: Path) -> None:
    facts = {**read_facts(folder), "status": "running"}
    run_folder.write_json(folder / "manifest.json", facts)
    assert is_abandoned(folder, facts)
    assert not is_abandoned(folder, {**facts, "pid": os.getpid()})
    command("report", folder)
    assert "ended without saying so" in (folder / "report.html").read_text()
    with held(folder):
        assert not is_abandoned(folder, facts)
    (folder / ".lock").unlink()
    os.mkfifo(folder / ".lock")
    assert not is_abandoned(folder, facts)
